"""Draws the pictures of the documentation: `python docs/pictures/draw.py` writes the SVG files beside it.

Each picture has a light ground of its own, so that it reads the same on a light and on a dark page.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

INK, PALE_INK, GROUND = "#1f2430", "#5a6270", "#f7f8fa"
BLUE, GREEN, ORANGE, RED, GREY, VIOLET = (
    "#cfe3fb",
    "#d3efd9",
    "#fde3c3",
    "#f9d2d4",
    "#e4e7ec",
    "#e3dafa",
)
FONT = "font-family='Helvetica, Arial, sans-serif'"


class Picture:
    """Boxes, arrows and words, in pixels from the top left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._lines = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' {FONT}>",
            f"<title>{escape(title)}</title>",
            "<defs><marker id='tip' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' "
            f"orient='auto-start-reverse'><path d='M0 0L10 5L0 10z' fill='{INK}'/></marker></defs>",
            f"<rect width='{width}' height='{height}' rx='10' fill='{GROUND}'/>",
        ]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *words: str
    ) -> None:
        """The first of `words` is bold; the others stand below it."""
        self._lines.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{fill}' stroke='{INK}' "
            "stroke-width='1'/>"
        )
        top = y + height / 2 - 8.5 * (len(words) - 1) + 5
        for number, line in enumerate(words):
            self.words(
                x + width / 2,
                top + 17 * number,
                line,
                bold=number == 0,
                pale=number > 0,
            )

    def words(
        self,
        x: float,
        y: float,
        line: str,
        *,
        bold: bool = False,
        pale: bool = False,
        anchor: str = "middle",
    ) -> None:
        weight, ink = ("bold" if bold else "normal"), (PALE_INK if pale else INK)
        self._lines.append(
            f"<text x='{x}' y='{y}' text-anchor='{anchor}' font-size='{14 if bold else 12.5}' "
            f"font-weight='{weight}' fill='{ink}'>{escape(line)}</text>"
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        path = "L".join(f"{x} {y}" for x, y in points)
        self._lines.append(
            f"<path d='M{path}' fill='none' stroke='{INK}' stroke-width='1.6' marker-end='url(#tip)'/>"
        )

    def text(self) -> str:
        return "\n".join([*self._lines, "</svg>\n"])


def architecture() -> Picture:
    picture = Picture(
        860, 430, "The parts of FlatFSDP: what each one does, and what it uses"
    )
    picture.box(
        30,
        20,
        800,
        50,
        GREY,
        "your program",
        "model, optimizer, for batch in microbatches(model, batches)",
    )
    picture.box(
        30,
        100,
        190,
        66,
        VIOLET,
        "compat",
        "Hugging Face, Accelerate,",
        "Lightning, fairscale",
    )
    picture.box(
        250,
        100,
        330,
        66,
        BLUE,
        "engine",
        "FlatFSDP, shard, auto_wrap, replayed",
        "units: gathered and reduced as a whole",
    )
    picture.box(
        610,
        100,
        220,
        66,
        ORANGE,
        "layers",
        "Linear ... TransformerLayer,",
        "16 bits or FP8",
    )
    picture.box(
        250, 200, 155, 66, BLUE, "engine/step", "when it moves:", "gather, free, reduce"
    )
    picture.box(
        425,
        200,
        155,
        66,
        BLUE,
        "engine/storage",
        "what is there: shards,",
        "buffers, main_grad",
    )
    picture.box(
        610,
        200,
        220,
        66,
        ORANGE,
        "matmul, fp8",
        "three GEMMs of a linear map,",
        "scales, casts",
    )
    picture.box(
        30,
        200,
        190,
        66,
        GREEN,
        "optim, checkpoint",
        "update and clip shards;",
        "save and load them",
    )
    picture.box(
        250, 300, 330, 44, RED, "contract", "what layers and engine know of each other"
    )
    picture.box(30, 374, 250, 44, GREY, "flat", "where each parameter lies in a buffer")
    picture.box(305, 374, 250, 44, GREY, "comm", "ranks, collectives, checks of both")
    picture.box(
        580, 374, 250, 44, GREY, "kernels", "Triton and cuBLASLt; PyTorch on CPUs"
    )
    for x in (125, 415, 720):
        picture.arrow((x, 70), (x, 98))
    picture.arrow((220, 133), (248, 133))
    picture.arrow((327, 166), (327, 198))
    picture.arrow((502, 166), (502, 198))
    picture.arrow((405, 233), (423, 233))
    picture.arrow((720, 166), (720, 198))
    picture.arrow((415, 266), (415, 298))
    picture.arrow((125, 266), (125, 322), (248, 322))
    picture.arrow((660, 266), (660, 322), (582, 322))
    users = ("engine, checkpoint use", "all use", "layers, engine, optimizers use")
    for x, line in zip((155, 430, 705), users, strict=True):
        picture.words(x, 367, line, pale=True)
    return picture


def parameter() -> Picture:
    picture = Picture(860, 330, "One parameter through one step")
    picture.box(
        20,
        30,
        180,
        74,
        GREEN,
        "master shard",
        "FP32, 1/N on this rank",
        "the optimizer's parameter",
    )
    picture.box(
        260,
        30,
        160,
        74,
        GREEN,
        "compute shard",
        "bf16, or FP8 bytes",
        "and one scale; 1/N",
    )
    picture.box(
        490,
        30,
        160,
        74,
        BLUE,
        "flat buffer",
        "all parameters of the",
        "unit, side by side",
    )
    picture.box(704, 30, 142, 74, BLUE, "module.weight", "an alias of", "its slice")
    picture.box(710, 210, 130, 74, ORANGE, "backward", "the weight", "gradient's GEMM")
    picture.box(
        490,
        210,
        160,
        74,
        ORANGE,
        "main_grad",
        "FP32, flat, whole unit;",
        "microbatches add up",
    )
    picture.box(
        260, 210, 160, 74, GREEN, "reduced gradient", "FP32, 1/N: the", "master's .grad"
    )
    picture.box(
        20,
        210,
        180,
        74,
        GREEN,
        "optimizer",
        "clip, AdamW; may write",
        "the compute shard, too",
    )
    picture.arrow((200, 67), (258, 67))
    picture.words(229, 58, "cast")
    picture.arrow((420, 67), (488, 67))
    picture.words(454, 58, "all-gather")
    picture.arrow((650, 67), (702, 67))
    picture.words(677, 58, "no copy")
    picture.arrow((775, 104), (775, 208))
    picture.words(768, 160, "forward, backward", anchor="end")
    picture.arrow((710, 247), (652, 247))
    picture.words(681, 238, "adds")
    picture.arrow((490, 247), (422, 247))
    picture.words(456, 228, "reduce-")
    picture.words(456, 241, "scatter")
    picture.arrow((260, 247), (202, 247))
    picture.arrow((110, 210), (110, 106))
    picture.words(118, 160, "once a step", anchor="start")
    for x, line in (
        (20, "green: 1/N on each rank"),
        (300, "blue: while the unit computes"),
        (600, "orange: in the backward"),
    ):
        picture.words(x, 318, line, pale=True, anchor="start")
    return picture


def step() -> Picture:
    picture = Picture(
        980,
        330,
        "One step of three microbatches under ZeRO-3, on one rank, with two units",
    )
    picture.words(
        20,
        28,
        "one rank, units A and B, three microbatches, ZeRO-3; time goes to the right",
        pale=True,
        anchor="start",
    )
    slot, left = 40.5, 115
    rows = {"gather": 45, "compute": 100, "main_grad": 155, "reduce": 210}
    for name, y in rows.items():
        picture.words(20, y + 25, name, bold=True, anchor="start")

    def put(row: str, time: float, fill: str, word: str, slots: float = 1) -> None:
        picture.box(left + slot * time, rows[row], slot * slots - 2, 38, fill, word)

    for microbatch in range(3):
        start = 6 * microbatch
        for time, unit in ((0, "A"), (1, "B"), (3, "B"), (4, "A")):
            put("gather", start + time, BLUE, unit)
        for time, word in enumerate(("f A", "f B", "loss", "b B", "b A"), start=1):
            put("compute", start + time, GREY, word)
        for time in (4.5, 5.5):
            put("main_grad", start + time, ORANGE, "add" if microbatch else "copy")
        name = f"microbatch {microbatch + 1}" + (
            ", the last" if microbatch == 2 else ""
        )
        picture.words(left + slot * (start + 3), 275, name, bold=True)
    put("reduce", 17.1, RED, "B")
    put("reduce", 18.1, RED, "A")
    put("compute", 19.2, GREEN, "optimizer", 2)
    picture.words(
        left,
        234,
        "nothing is reduced before the last microbatch",
        pale=True,
        anchor="start",
    )
    keys = (
        "f, b: forward, backward",
        "copy, add: the gradient lands in main_grad",
        "A buffer is freed after each use",
    )
    for x, key in zip((20, 260, 620), keys, strict=True):
        picture.words(x, 310, key, pale=True, anchor="start")
    return picture


PICTURES = {"architecture": architecture, "parameter": parameter, "step": step}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(draw().text())
