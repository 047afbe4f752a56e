"""`penstock doctor --cuda-device`: measures both ways to copy pieces from and to a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.table import Table

from penstock._native import DirectionTimes, cuda_calibration
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
    times = cuda_calibration(device)

    def of(found: DirectionTimes) -> Direction:
        rows = [
            PieceRow(
                piece.piece_bytes,
                times.copy_bytes / piece.copy_engine_seconds / 1e9,
                times.copy_bytes / piece.kernel_seconds / 1e9,
            )
            for piece in found.pieces
        ]
        return Direction(found.copy_engine_from, rows)

    return {"gather": of(times.gather), "scatter": of(times.scatter)}


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
