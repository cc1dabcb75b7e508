"""Draw who holds what, tokens x heads, while the sequence is sharded and while attention runs.

    python examples/draw_layout.py --out examples/layout.png      # the picture of the README
    python examples/draw_layout.py --text 7 --image 20 --heads 6 --ring 2 --ulysses 4

Made from the layouts that the engine itself works with (meshcp.placements); no process group is needed.
"""

from __future__ import annotations

import argparse

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from meshcp.placements import HeadLayout, SequenceLayout


def owners(layout: SequenceLayout, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank (ring * ulysses degree + ulysses) of each (token, head): between attentions, and inside attention."""
    between = np.zeros((layout.length, heads), int)
    inside = np.zeros((layout.length, heads), int)
    head_layout = HeadLayout(heads, heads, layout.ulysses)
    for ring in range(layout.ring):
        for ulysses in range(layout.ulysses):
            rank = ring * layout.ulysses + ulysses
            for start, stop in layout.rows(ring, ulysses):
                between[start:stop] = rank
            first, last = head_layout.query(ulysses)
            for start, stop in layout.block(ring):
                inside[start:stop, first:last] = rank
    return between, inside


def panel(axes: Axes, grid: np.ndarray, layout: SequenceLayout, title: str) -> None:
    ranks = layout.ring * layout.ulysses
    axes.imshow(grid, cmap="tab20", vmin=0, vmax=19, aspect="auto")
    for token in range(grid.shape[0]):
        for head in range(grid.shape[1]):
            axes.text(head, token, str(grid[token, head]), ha="center", va="center", fontsize=7)
    axes.axhline(layout.lengths[0] - 0.5, color="black", linewidth=2)
    axes.set_title(title, fontsize=9)
    axes.set(xlabel="heads", xticks=range(grid.shape[1]))
    names = [f"t{i}" for i in range(layout.lengths[0])] + [f"i{i}" for i in range(layout.lengths[1])]
    axes.set_yticks(range(grid.shape[0]), names, fontsize=7)
    assert grid.max() < ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("text", 5), ("image", 11), ("heads", 5), ("ring", 2), ("ulysses", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", default="layout.png")
    options = parser.parse_args()
    layout = SequenceLayout((options.text, options.image), options.ring, options.ulysses)
    between, inside = owners(layout, options.heads)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 5), constrained_layout=True)
    panel(left, between, layout, "between attentions: every head of its own tokens")
    panel(right, inside, layout, "in attention: its own heads of a ring block")
    figure.suptitle(
        f"Which rank holds what: {options.text} text + {options.image} image tokens, {options.heads} heads, "
        f"ring {options.ring} x ulysses {options.ulysses}"
    )
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
