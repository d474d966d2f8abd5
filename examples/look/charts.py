"""The pages of a sales report as pictures: a bar for each shop, and of each shop a bar for each
day.

A report is a number, from which all of it follows. `python charts.py 7 shops` writes a page.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SHOPS = {
    "red": (200, 40, 40),
    "blue": (40, 80, 200),
    "green": (40, 150, 60),
    "gold": (225, 180, 40),
}
DAYS = ("mon", "tue", "wed", "thu", "fri")
FRONT = "shops"  # the first page; the others are named like the shops
TRAINED_SIZES, HELDOUT_SIZES = (84, 112, 140), (98, 126)  # pixels of a page's side
HELDOUT = 100_000  # reports from this number on


@dataclass(frozen=True)
class Report:
    sales: dict[str, dict[str, float]]  # of each shop on each day, shops as they are drawn
    size: int
    width: float  # of a bar, as a share of its place
    shade: int  # how colours differ from those of SHOPS

    @property
    def best(self) -> str:
        return max(self.sales, key=lambda shop: sum(self.sales[shop].values()))

    def best_day(self, shop: str) -> str:
        days = self.sales[shop]
        return max(days, key=days.__getitem__)

    @property
    def answer(self) -> str:
        """The day on which the best shop sold most."""
        return self.best_day(self.best)


def report(number: int) -> Report:
    rng = random.Random(f"report {number}")
    shops = rng.sample(list(SHOPS), len(SHOPS))
    totals = dict(zip(shops, bars(len(shops), rng), strict=True))
    sales = {}
    for shop, total in totals.items():
        days = bars(len(DAYS), rng)
        sales[shop] = {d: total * x / sum(days) for d, x in zip(DAYS, days, strict=True)}
    sizes = HELDOUT_SIZES if number >= HELDOUT else TRAINED_SIZES
    return Report(sales, rng.choice(sizes), rng.uniform(0.5, 0.9), rng.randint(-25, 25))


def bars(count: int, rng: random.Random) -> list[float]:
    """Heights, of which one is clearly the highest."""
    heights = [rng.uniform(0.1, 0.7) for _ in range(count)]
    heights[rng.randrange(count)] = 1.0
    return heights


@lru_cache(1000)  # all rollouts of a group look at the same report
def page(number: int, name: str) -> bytes:
    """A page of a report as PNG. Raises KeyError if there is none of this name."""
    shown = report(number)
    if name == FRONT:
        days = {shop: sum(sales.values()) for shop, sales in shown.sales.items()}
        return draw(shown, days, list(days))
    return draw(shown, shown.sales[name], [name] * len(DAYS))


def draw(shown: Report, heights: dict[str, float], colours: list[str]) -> bytes:
    size, ground = shown.size, 230 + shown.shade
    image = Image.new("RGB", (size, size), (ground, ground, ground))
    pen, base = ImageDraw.Draw(image), round(0.86 * size)
    step, most = size / len(heights), max(heights.values())
    for number, (label, height) in enumerate(heights.items()):
        middle, half = (number + 0.5) * step, shown.width * step / 2
        top = base - round(0.8 * size * height / most)
        ink = tuple(max(0, x + shown.shade) for x in SHOPS[colours[number]])
        pen.rectangle((middle - half, top, middle + half, base), fill=ink)
        pen.text((middle, size), label, fill=(0, 0, 0), anchor="md", font=font(size // 10))
    pen.line((0, base, size, base), fill=(0, 0, 0))
    return png(image)


@lru_cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def hidden(number: int) -> bytes:
    """A grey picture, as large as a page of the report."""
    size = report(number).size
    return png(Image.new("RGB", (size, size), (128, 128, 128)))


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    _, which, asked = sys.argv
    Path(f"{which}-{asked}.png").write_bytes(page(int(which), asked))
