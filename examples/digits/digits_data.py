"""scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, enlarged for training and shrunk again for judging."""

import torch
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

REAL_SIZE = 8


def real_digits() -> tuple[Tensor, Tensor]:
    """Every real picture `[1797, 1, 8, 8]` in [0, 1] and its label `[1797]`."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).to(torch.float32).unsqueeze(1) / 16
    return images, torch.from_numpy(digits.target)


def resized(images: Tensor, height: int, width: int) -> Tensor:
    """`[N, 1, H, W]` to `[N, 1, height, width]`, both in [0, 1].

    Bicubic, because enlarging and shrinking again then blurs least: the classifier below reads the round trip as well
    as the originals.
    """
    return resize(images, [height, width], InterpolationMode.BICUBIC, antialias=True).clamp(0, 1)


def train_classifier() -> SVC:
    """A support vector machine that has seen only the real 8 x 8 pictures, never a generated one."""
    images, labels = real_digits()
    return SVC(C=10).fit(images.flatten(1).numpy(), labels.numpy())


def recognised(classifier: SVC, images: Tensor, labels: list[int]) -> float:
    """The share of the pictures `[N, 1, H, W]` that the classifier reads as their labels."""
    small = resized(images.cpu().float(), REAL_SIZE, REAL_SIZE)
    read = torch.from_numpy(classifier.predict(small.flatten(1).numpy()))
    return (read == torch.tensor(labels)).float().mean().item()
