"""`penstock doctor --cuda-device`: measures both ways to copy pieces from and to a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.table import Table

from penstock._native import cuda_calibration
from penstock.cli import words


@dataclass(frozen=True)
class PieceRow:
    """Measured copies of pieces of one size."""

    piece_bytes: int
    copy_engine_gb_s: float
    kernel_gb_s: float


@dataclass(frozen=True)
class Direction:
    """Measured copies in one direction."""

    copy_engine_from: int
    """Mean bytes of a piece from which on the copy engines are used. A kernel copies smaller
    pieces."""
    rows: list[PieceRow]


def measure(device: int) -> dict[str, Direction]:
    """Measures copies from the device (`gather`) and to it (`scatter`).

    Raises:
        Unavailable: the driver or the device cannot be used.
    """
    copied, *directions = cuda_calibration(device)

    def of(found: tuple[int, list[tuple[int, float, float]]]) -> Direction:
        copy_engine_from, timings = found
        rows = [
            PieceRow(size, copied / engine / 1e9, copied / kernel / 1e9)
            for size, engine, kernel in timings
        ]
        return Direction(copy_engine_from, rows)

    return dict(zip(("gather", "scatter"), map(of, directions), strict=True))


def run(device: int, *, as_json: bool) -> int:
    """Measures the copies and shows the figures."""
    found = measure(device)
    if as_json:
        document = {name: asdict(direction) for name, direction in found.items()}
        words.print_json({"cuda_device": device, **document})
        return 0
    console = words.console()
    for name, direction in found.items():
        title = f"{name}: copy engines from {words.size(direction.copy_engine_from)} a piece"
        table = Table("piece", "copy engines, GB/s", "kernel, GB/s", title=title)
        for row in direction.rows:
            table.add_row(
                words.size(row.piece_bytes),
                f"{row.copy_engine_gb_s:.1f}",
                f"{row.kernel_gb_s:.1f}",
            )
        console.print(table)
    return 0
