"""Draw the small pictures that come with the package, from seeds alone.

    python scripts/make_bundled_pictures.py anywidth/app/tasks/super_resolution/bundled_pictures

With them super-resolution works without a download. Each picture is drawn four times larger and
averaged down, so that edges have sub-pixel detail as in a photograph: letters, twigs, window panes
and threads, which bicubic upscaling blurs and a network can restore. Lettering uses DejaVu, which
comes with matplotlib.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Field = NDArray[np.float64]
Random = np.random.Generator

SIDE = 256
OVERSAMPLING = 4
BIG = SIDE * OVERSAMPLING

VOCABULARY = """
river window lantern orchard copper meadow signal harbour granite violet engine marble
winter thunder canvas pepper castle silver pocket valley ribbon summit kitchen feather magnet garden
island cobalt puzzle ladder forest mirror rocket anchor saddle velvet quartz jungle beacon walnut
zephyr hollow dynamo crystal bakery fjord xylophone kiosk vapour whisper
"""
WORDS = VOCABULARY.split()


def font(name: str, height: float) -> ImageFont.FreeTypeFont:
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(folder / f"DejaVu{name}.ttf", height)


def fractal(random: Random, roughness: float, side: int = BIG) -> Field:
    """Noise whose spectrum falls as 1 / frequency ** roughness, scaled to [0, 1]."""
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(side), np.fft.fftfreq(side)))
    frequency[0, 0] = np.inf
    spectrum = np.fft.fft2(random.standard_normal((side, side))) / frequency**roughness
    noise = np.fft.ifft2(spectrum).real
    return (noise - noise.min()) / (noise.max() - noise.min())


def grid() -> tuple[Field, Field]:
    """Horizontal and vertical position of every pixel, in [0, 1]."""
    axis = (np.arange(BIG) + 0.5) / BIG
    across, down = np.meshgrid(axis, axis)
    return across, down


def polar(radius: float, angle: float) -> tuple[float, float]:
    """A point around the middle of the picture; the radius is relative to its side."""
    return BIG * (0.5 + radius * np.cos(angle)), BIG * (0.5 + radius * np.sin(angle))


def blend(first: object, second: object, share: Field) -> Field:
    """Blend from one colour (or picture) to another as `share` goes from 0 to 1."""
    share = np.clip(share, 0, 1)[..., None]
    return np.asarray(first, float) * (1 - share) + np.asarray(second, float) * share


def to_image(colours: Field) -> Image.Image:
    return Image.fromarray(np.clip(colours, 0, 255).astype(np.uint8), "RGB")


def shading(height: Field, strength: float) -> Field:
    """Brightness of a surface lit from the upper left."""
    down, across = np.gradient(height)
    normal = np.sqrt(1 + strength**2 * (down**2 + across**2))
    return (1 - strength * (down + across) * 0.7) / normal


def nearest_two(random: Random, count: int, stretch: float = 1.0) -> tuple[Field, Field, Field]:
    """Distances to the nearest and second nearest of scattered points, and the nearest point."""
    across, down = grid()
    first, second = np.full((BIG, BIG), np.inf), np.full((BIG, BIG), np.inf)
    owner = np.zeros((BIG, BIG), int)
    for index, (x, y) in enumerate(random.uniform(-0.05, 1.05, (count, 2))):
        distance = np.hypot(across - x, (down - y) * stretch)
        second = np.minimum(second, np.maximum(first, distance))
        owner[distance < first] = index
        first = np.minimum(first, distance)
    return first, second, owner


def text_page(random: Random) -> Image.Image:
    """A printed page: a heading and paragraphs in three sizes of serif type."""
    paper = blend((236, 226, 206), (250, 246, 236), fractal(random, 1.2))
    image = to_image(paper)
    draw = ImageDraw.Draw(image)
    top = 0.04 * BIG
    heading = " ".join(random.choice(WORDS, 2)).title()
    draw.text((0.05 * BIG, top), heading, (120, 30, 24), font("Serif-Bold", 0.105 * BIG))
    top += 0.15 * BIG
    for height in (
        0.058,
        0.058,
        0.058,
        0.046,
        0.046,
        0.046,
        0.046,
        0.036,
        0.036,
        0.036,
        0.036,
        0.036,
    ):
        line = " ".join(random.choice(WORDS, 12))
        style = "Serif" if height > 0.05 else "Serif-Italic" if height > 0.04 else "Sans"
        draw.text((0.05 * BIG, top), line, (34, 32, 40), font(style, height * BIG))
        top += 1.45 * height * BIG
    return image


def poster(random: Random) -> Image.Image:
    """Light lettering of falling size on a dark ground, between rules."""
    image = to_image(blend((18, 42, 66), (46, 92, 110), fractal(random, 2)))
    draw = ImageDraw.Draw(image)
    top = 0.03 * BIG
    for height in (0.2, 0.14, 0.1, 0.075, 0.055, 0.042, 0.034, 0.028):
        line = " ".join(random.choice(WORDS, max(1, int(0.32 / height)))).upper()
        draw.text((0.04 * BIG, top), line, (244, 214, 130), font("Sans-Bold", height * BIG))
        top += 1.2 * height * BIG
        draw.line((0.04 * BIG, top, 0.96 * BIG, top), (214, 110, 80), 6)
        top += 0.02 * BIG
    return image


def city(random: Random) -> Image.Image:
    """Three rows of towers with lit windows at dusk."""
    _, down = grid()
    sky = blend((40, 52, 110), (250, 170, 120), down * 1.2 + 0.15 * fractal(random, 1.8))
    image = to_image(sky)
    draw = ImageDraw.Draw(image)
    for depth, (tone, pane) in enumerate(((104, 10), (66, 13), (34, 17))):
        left = -40.0
        while left < BIG:
            width = random.uniform(90, 190)
            roof = BIG * (random.uniform(0.2, 0.5) + 0.16 * depth)
            wall = tuple(int(tone * share) for share in random.uniform(0.8, 1.25, 3))
            draw.rectangle((left, roof, left + width, BIG), wall)
            mast = left + width * random.uniform(0.2, 0.8)
            draw.line((mast, roof - random.uniform(20, 110), mast, roof), wall, 5)
            for y in np.arange(roof + pane, BIG, 2.1 * pane):
                for x in np.arange(left + pane, left + width - pane, 1.7 * pane):
                    lit = random.random() < 0.4
                    glow = (255, 226, 150) if lit else tuple(int(c * 0.7) for c in wall)
                    draw.rectangle((x, y, x + 0.9 * pane, y + 1.2 * pane), glow)
            left += width + random.uniform(-10, 25)
    return image


def tree(random: Random) -> Image.Image:
    """Bare branches, ever finer, before a cloudy sky."""
    image = to_image(blend((96, 148, 206), (246, 244, 238), fractal(random, 1.7) * 1.4 - 0.2))
    draw = ImageDraw.Draw(image)

    def branch(x: float, y: float, angle: float, length: float, thickness: float) -> None:
        if length < 7:
            draw.ellipse(
                (x - 5, y - 5, x + 5, y + 5), tuple(random.integers((120, 40, 20), (220, 130, 50)))
            )
            return
        for _ in range(3):
            angle += random.normal(0, 0.12)
            end_x, end_y = x + length / 3 * np.cos(angle), y + length / 3 * np.sin(angle)
            draw.line((x, y, end_x, end_y), (58, 42, 36), max(2, round(thickness)))
            x, y = end_x, end_y
        for side in (-1, 1):
            turn = side * random.uniform(0.2, 0.65)
            branch(x, y, angle + turn, length * random.uniform(0.68, 0.82), thickness * 0.68)

    branch(BIG * 0.5, BIG * 1.02, -np.pi / 2, BIG * 0.27, 46)
    return image


def terrain(random: Random) -> Image.Image:
    """A shaded relief map with contour lines, a lake in its lowest part."""
    height = fractal(random, 2.4)
    colours = blend((86, 130, 70), (196, 170, 120), (height - 0.4) * 3)
    colours = blend(colours, (250, 250, 250), (height - 0.72) * 12)
    colours *= shading(height * BIG, 0.16)[..., None]
    step = np.abs((height * 16) % 1 - 0.5) * 2
    slope = np.hypot(*np.gradient(height * 16))
    colours = blend(colours, (96, 62, 40), 0.8 * (step < 3 * slope).astype(float))
    lake = np.where(height < 0.36, 1.0, 0.0)
    return to_image(blend(colours, (70, 120, 178), lake))


def stained_glass(random: Random) -> Image.Image:
    """Coloured panes between lead lines."""
    first, second, owner = nearest_two(random, 170)
    panes = random.uniform(20, 255, (170, 3))[owner]
    panes *= (0.75 + 0.5 * fractal(random, 1.3))[..., None]
    return to_image(blend((22, 20, 24), panes, (second - first - 0.004) * 700))


def pebbles(random: Random) -> Image.Image:
    """Round stones with speckles, lit from the upper left."""
    first, second, owner = nearest_two(random, 260, stretch=1.3)
    dome = np.sqrt(np.clip(1 - first / (first + second) * 1.9, 0, 1))
    stones = random.uniform(90, 220, (260, 1)) + random.normal(0, 8, (260, 3))
    speckles = 0.8 + 0.45 * fractal(random, 0.9)
    light = shading(dome * 26, 1.0) * (0.25 + 0.75 * dome)
    return to_image(stones[owner] * (light * speckles)[..., None])


def weave(random: Random) -> Image.Image:
    """Checked cloth, thread over thread."""
    across, down = grid()
    warp = random.uniform(30, 230, (9, 3))[(across * 9).astype(int) % 9]
    weft = random.uniform(30, 230, (9, 3))[(down * 9).astype(int) % 9]
    threads = 46 + 4 * (fractal(random, 2.2) - 0.5)
    u, v = across * threads, down * threads
    is_over = (np.floor(u) + np.floor(v)) % 2 == 0
    round_warp = np.sin(np.pi * (u % 1)) * (0.55 + 0.45 * np.sin(np.pi * (v % 1)))
    round_weft = np.sin(np.pi * (v % 1)) * (0.55 + 0.45 * np.sin(np.pi * (u % 1)))
    light = np.where(is_over, round_warp, round_weft)[..., None]
    fibre = (0.85 + 0.3 * fractal(random, 0.7))[..., None]
    return to_image(np.where(is_over[..., None], warp, weft) * (0.25 + 0.85 * light) * fibre)


def bricks(random: Random) -> Image.Image:
    """A wall that runs away to the right."""
    across, down = grid()
    depth = 1 / (1.25 - across)
    u, v = depth * 6 + 0.01 * fractal(random, 1.5), (down - 0.5) * depth * 12 + 40
    course = np.floor(v)
    u = u + 0.5 * (course % 2)
    colour = random.uniform((120, 50, 36), (200, 110, 84), (4096, 3))
    face = colour[(np.floor(u) * 61 + course * 17).astype(int) % 4096]
    mortar = np.minimum(np.minimum(u % 1, 1 - u % 1) * 2.2, np.minimum(v % 1, 1 - v % 1))
    grain = (0.7 + 0.6 * fractal(random, 0.8))[..., None]
    return to_image(blend((206, 198, 184), face, (mortar - 0.06) * 40) * grain)


def strands(
    random: Random, dark: tuple[int, ...], light: tuple[int, ...], curl: float
) -> Image.Image:
    """Noise smeared along a flow: hair, grass or fur."""
    angle = (fractal(random, 2.4) - 0.5) * curl
    noise = random.standard_normal((BIG, BIG))
    down, across = np.meshgrid(np.arange(BIG) + 0.0, np.arange(BIG) + 0.0, indexing="ij")
    smeared = np.zeros((BIG, BIG))
    for _ in range(110):
        row, column = down.astype(int) % BIG, across.astype(int) % BIG
        smeared += noise[row, column]
        down, across = down - np.cos(angle[row, column]), across + np.sin(angle[row, column])
    smeared = np.sum([np.roll(smeared, shift, 1) for shift in range(4)], axis=0)
    brightness = 0.5 + 0.28 * smeared / smeared.std() + 0.5 * (fractal(random, 2) - 0.5)
    return to_image(blend(dark, light, brightness))


def sunflower(random: Random) -> Image.Image:
    """Seeds on golden-angle spirals inside two rings of petals."""
    image = to_image(blend((44, 92, 44), (120, 170, 96), fractal(random, 1.6)))
    draw = ImageDraw.Draw(image)
    for length, petal in ((0.49, (216, 150, 20)), (0.45, (250, 200, 40))):
        for turn in np.arange(0, 2 * np.pi, 0.19) + length * 9:
            spread = (-0.11, -0.07, 0.0, 0.07, 0.11)
            reach = (0.28, 0.38, length, 0.38, 0.28)
            outline = [polar(r, turn + s) for r, s in zip(reach, spread, strict=True)]
            draw.polygon(outline, petal, (140, 84, 10), 3)
            draw.line((polar(0, 0), polar(0.42, turn)), (180, 110, 10), 3)
    for index in range(900, 0, -1):
        x, y = polar(0.0098 * np.sqrt(index), index * 2.399963)
        size = 9 + 0.006 * index
        seed = (60 + index // 10, 36 + index // 18, 20 + index // 90)
        draw.ellipse((x - size, y - size, x + size, y + size), seed)
        draw.ellipse((x - size / 2, y - size / 2, x, y), (236, 196, 120))
    return image


def street_map(random: Random) -> Image.Image:
    """Blocks, parks, a river and named streets."""
    image = Image.new("RGB", (BIG, BIG), (242, 238, 230))
    draw = ImageDraw.Draw(image)
    for x, y in random.uniform(0, BIG, (90, 2)):
        width, height = random.uniform(40, 150, 2)
        tone = (190, 222, 172) if random.random() < 0.3 else (222, 212, 200)
        draw.rectangle((x, y, x + width, y + height), tone, (180, 168, 150), 3)
    bank = np.linspace(-50, BIG + 50, 60)
    bend = BIG * (0.55 + 0.16 * np.sin(bank / 190 + random.uniform(0, 6)))
    draw.line(list(zip(bank, bend, strict=True)), (150, 196, 230), 70, "curve")
    streets = [
        (random.uniform(0, BIG), random.normal(0, 0.18), side)
        for side in range(2)
        for _ in range(9)
    ]
    for casing in (True, False):
        for index, (offset, tilt, side) in enumerate(streets):
            wide = 30 if index % 4 == 0 else 17
            ends = ((-9, offset), (BIG + 9, offset + tilt * BIG))
            points = [end[::-1] if side else end for end in ends]
            fill = (
                (150, 140, 130)
                if casing
                else (255, 216, 120)
                if index % 4 == 0
                else (255, 255, 255)
            )
            draw.line(points, fill, wide + 8 if casing else wide)
    for offset, _, side in streets[::2]:
        if side == 0:
            name = str(random.choice(WORDS)).title() + " Street"
            draw.text(
                (random.uniform(0, 0.6) * BIG, offset), name, (60, 56, 66), font("Sans-Bold", 34)
            )
    return image


def clock(random: Random) -> Image.Image:
    """A wooden wall clock with minute marks and numerals."""
    across, _ = grid()
    rings = np.sin(across * 60 + fractal(random, 2.2) * 40) * 0.5 + 0.5
    image = to_image(blend((120, 74, 40), (176, 118, 70), rings))
    draw = ImageDraw.Draw(image)
    ink, noon = (40, 36, 44), -np.pi / 2
    for radius, tone in ((0.47, (60, 40, 28)), (0.455, (212, 180, 110)), (0.43, (246, 242, 230))):
        draw.ellipse(
            (*polar(radius * 2**0.5, -np.pi * 3 / 4), *polar(radius * 2**0.5, np.pi / 4)), tone
        )
    for minute in range(60):
        angle = noon + minute * np.pi / 30
        inner, thickness = (0.375, 12) if minute % 5 == 0 else (0.4, 5)
        draw.line((polar(inner, angle), polar(0.42, angle)), ink, thickness)
    for hour in range(1, 13):
        draw.text(
            polar(0.32, noon + hour * np.pi / 6), str(hour), ink, font("Serif-Bold", 90), "mm"
        )
    draw.line((polar(0, 0), polar(0.2, noon + 0.87 * 2 * np.pi)), ink, 26)
    draw.line((polar(0, 0), polar(0.34, noon + 0.13 * 2 * np.pi)), ink, 16)
    draw.line((polar(0, 0), polar(0.38, noon + 0.61 * 2 * np.pi)), (190, 40, 30), 5)
    maker = str(random.choice(WORDS))
    draw.text(polar(0.1, np.pi / 2), maker, (90, 80, 80), font("Serif-Italic", 44), "mm")
    return image


def chart(random: Random) -> Image.Image:
    """A test chart: a star, rings, wedges of bars and rows of digits."""
    across, down = grid()
    angle, radius = np.arctan2(down - 0.3, across - 0.3), np.hypot(down - 0.3, across - 0.3)
    star = (np.sin(angle * 36) > 0).astype(float)
    rings = 0.5 + 0.5 * np.cos(900 * ((across - 0.72) ** 2 + (down - 0.3) ** 2))
    colours = blend((232, 232, 228), (30, 34, 60), np.where(radius < 0.24, star, 0.0))
    inside = np.hypot(across - 0.72, down - 0.3) < 0.19
    colours = np.where(inside[..., None], blend((240, 236, 220), (150, 24, 40), rings), colours)
    image = to_image(colours)
    draw = ImageDraw.Draw(image)
    left = 0.05 * BIG
    for bar in np.geomspace(30, 5, 26):
        draw.polygon(
            ((left, 0.6 * BIG), (left + bar, 0.6 * BIG), (left + 0.5 * bar, 0.76 * BIG)),
            (20, 70, 60),
        )
        left += 2 * bar
    top = 0.79 * BIG
    for height in (0.07, 0.05, 0.036):
        digits = " ".join(str(number) for number in random.integers(0, 999, 14))
        draw.text((0.05 * BIG, top), digits, (26, 26, 30), font("SansMono", height * BIG))
        top += 1.2 * height * BIG
    return image


PICTURES: dict[str, Callable[[Random], Image.Image]] = {
    "train/text_page": text_page,
    "train/city": city,
    "train/tree": tree,
    "train/terrain": terrain,
    "train/stained_glass": stained_glass,
    "train/pebbles": pebbles,
    "train/weave": weave,
    "train/bricks": bricks,
    "train/hair": lambda random: strands(random, (46, 22, 12), (230, 170, 110), 9.0),
    "train/sunflower": sunflower,
    "train/street_map": street_map,
    "train/clock": clock,
    "eval/poster": poster,
    "eval/skyline": city,
    "eval/grass": lambda random: strands(random, (16, 50, 20), (190, 220, 110), 3.0),
    "eval/chart": chart,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where train/ and eval/ are written")
    folder: Path = parser.parse_args().folder
    for seed, (name, paint) in enumerate(PICTURES.items()):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        paint(np.random.default_rng(seed)).reduce(OVERSAMPLING).save(path, optimize=True)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
