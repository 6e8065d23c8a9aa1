"""Saving figures: the suffix sets the format, and a failure keeps the old picture."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from kvrsim.errors import InputError
from kvrsim.views.figure import SUFFIXES, check_suffix, encode_figure, save_figure

MAGIC = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF"}


def figure() -> Figure:
    drawn = Figure(figsize=(2, 1))
    drawn.add_subplot().plot([1, 2], [2, 1], label="a")
    return drawn


@pytest.mark.parametrize("name", ["a.png", "a.PNG", "a.svg", "b.SvG", "a.pdf", "a.b.PDF"])
def test_the_suffix_says_the_format(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    save_figure(figure(), path)
    assert path.read_bytes().startswith(MAGIC[path.suffix.lower()])
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_figure_gives_the_same_bytes_and_no_dates(suffix: str) -> None:
    assert encode_figure(figure(), suffix) == encode_figure(figure(), suffix)
    for word in (b"Date", b"matplotlib.org", b"Matplotlib v"):
        assert word not in encode_figure(figure(), suffix)


@pytest.mark.parametrize("name", ["a", "a.jpg", "png", ".png", "a.png.gz"])
def test_other_suffixes_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"picture.*\.png, \.svg or \.pdf"):
        check_suffix(name, "picture")
    with pytest.raises(InputError, match="plot"):
        save_figure(figure(), tmp_path / name)
    assert os.listdir(tmp_path) == []
