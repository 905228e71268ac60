"""Draw docs/img/display.svg, the live display in the middle of a run: python benchmarks/display_picture.py RUN"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from srl.config import load
from srl.launch.run import title
from srl.monitor.console import LiveDisplay
from srl.monitor.monitor import Row
from srl.monitor.sinks import read_metrics


def main() -> None:
    run_dir = Path(sys.argv[1])
    x, rows = load(run_dir), read_metrics(run_dir)
    row = rows[len(rows) // 2]
    bottleneck = row.pop("bottleneck")
    console = Console(file=io.StringIO(), force_terminal=True, width=110, record=True)
    shown = LiveDisplay(console, title(x), x.steps)
    shown.write(Row(row, bottleneck))
    shown.close()
    picture = Console(file=io.StringIO(), force_terminal=True, width=110, record=True)
    picture.print(shown.picture(row, bottleneck))
    target = Path(__file__).parent.parent / "docs" / "img" / "display.svg"
    target.write_text(picture.export_svg(title="srl train"))


if __name__ == "__main__":
    main()
