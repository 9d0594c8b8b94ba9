"""Whole reports: the numbers and panels of pages, the axes of pictures, and statistics of columns,
for a run that logs every metric they show."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from megatron_async_rl.metrics.log import MetricRow
from megatron_async_rl.metrics.timeline import Span
from megatron_async_rl.report import metric_rows
from megatron_async_rl.report.comparison import name_runs, page_of_runs
from megatron_async_rl.report.metric_rows import MetricRows, smooth, thin
from megatron_async_rl.report.page import page_of
from megatron_async_rl.report.panel import Curve, Level, Panel
from megatron_async_rl.report.report import draw_sheet, percent, tick, write_report
from megatron_async_rl.report.run_data import read_run, span
from megatron_async_rl.report.timeline_panel import merge_short
from tests.full_run import row_of, written
from tests.stored_pages import listed, require_page


def shown(page: Any, folder: Path) -> str:
    """Return the parts and panels of a page, with a line for each tag and panel."""
    text = "".join(f"{name}: {value}\n" for name, value in page.parts.items())
    text = re.sub(r"(</[a-z]+>|<br>)(?=<)", r"\1\n", text)
    panels = {f"panel {index}": panel for index, panel in enumerate(page.drawn())}
    # Equal on all panels that have any.
    for panel in list(panels.values())[1:]:
        panel["marks"] = len(panel["marks"])
    return (text + listed(panels)).replace(str(folder), "FOLDER")


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_the_whole_page_of_a_run_is_the_one_stored(tmp_path: Path) -> None:
    other = written(tmp_path / "the_other", 20)
    run = written(tmp_path / "run", observe={"beside": str(other)})
    page = page_of(read_run(run, alone=False))
    require_page("report/run", shown(page, tmp_path))
    assert page.as_html().count("<section") > 3


def test_the_whole_page_of_a_short_run_is_the_one_stored(tmp_path: Path) -> None:
    run = written(tmp_path / "run", 2)
    for name in ("status.json", "config.yaml", "events.jsonl", "eval.jsonl", "simulation.json"):
        (run / name).unlink()
    require_page("report/short_run", shown(page_of(read_run(run)), tmp_path))


def test_the_whole_page_of_a_supervised_run_is_the_one_stored(tmp_path: Path) -> None:
    run = written(tmp_path / "run", 13, controls=[])
    kept = ("step", "version", "time", "policy/", "tokens/trained", "time/")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in one.items() if k.startswith(kept)} for one in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    status = {"phase": "finished", "step": 13, "steps": 13, "time": 0.0, "measure": "loss"}
    (run / "status.json").write_text(json.dumps(status | {"before": 3.0, "after": 1.5}))
    losses = [{"version": version, "loss": 3.0 - version / 10, "tokens": 9} for version in (0, 6)]
    (run / "eval.jsonl").write_text("".join(json.dumps(one) + "\n" for one in losses))
    require_page("report/supervised_run", shown(page_of(read_run(run)), tmp_path))


def test_the_whole_page_of_several_runs_is_the_one_stored(tmp_path: Path) -> None:
    first = written(tmp_path / "a" / "run", 30)
    second = written(tmp_path / "b" / "run", 8, flow={"async_ratio": 0}, controls=[])
    (second / "status.json").unlink()
    runs = [first, tmp_path / "none", second]
    data = [read_run(first), None, read_run(second)]
    require_page("report/comparison", shown(page_of_runs(name_runs(runs, data)), tmp_path))


def axes_text(axes: Axes) -> dict[str, Any]:
    """Return what is drawn on `axes`."""
    legend = axes.get_legend()
    return {
        "box": list(axes.get_position().bounds),
        "texts": [axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()],
        "limits": [list(axes.get_xlim()), list(axes.get_ylim()), axes.get_yscale()],
        "ticks": [
            [axis.get_major_formatter()(place, index) for index, place in enumerate(places)]
            for axis, places in ((axes.xaxis, axes.get_xticks()), (axes.yaxis, axes.get_yticks()))
        ],
        "grid": [
            axes.get_axisbelow(),
            len([one for one in axes.get_xgridlines() if one.get_visible()]),
        ],
        "spines": [one.get_visible() for one in axes.spines.values()],
        "lines": [
            [
                to_hex(line.get_color()),
                *(line.get_alpha(), line.get_linewidth(), str(line.get_linestyle())),
                *(str(line.get_marker()), line.get_markersize(), line.get_zorder()),
                *(len(line.get_xdata()), line.get_clip_on()),
                *np.asarray(line.get_xydata())[-1:].tolist(),
            ]
            for line in axes.lines
        ],
        "areas": [
            [
                *(to_hex(one.get_facecolor()[0]), float(one.get_alpha() or 1.0)),
                *np.concatenate([path.vertices for path in one.get_paths()]).sum(axis=0).tolist(),
            ]
            for one in axes.collections
        ],
        "columns": [
            [to_hex(one.get_facecolor()), one.get_x(), one.get_width(), one.get_height()]
            for one in axes.patches
        ],
        "labels": [[one.get_text(), *one.get_position(), one.get_ha()] for one in axes.texts],
        "legend": None
        if legend is None
        else [
            *([one.get_text() for one in legend.get_texts()], legend.get_frame_on()),
            *(legend._ncols, [one.get_linewidth() for one in legend.get_lines()]),
            [to_hex(one.get_color()) for one in legend.get_texts()],
        ],
    }


def pictures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return a list to which each drawn figure is added, instead of being written."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    return figures


def figure_text(figure: Figure) -> str:
    head = [[one.get_text(), *one.get_position(), to_hex(one.get_color())] for one in figure.texts]
    sizes = [*figure.get_size_inches().tolist(), figure.get_dpi()]
    return listed({"head": head, "size": sizes}) + "".join(
        listed({f"panel {index}": axes_text(axes)}) for index, axes in enumerate(figure.axes)
    )


def test_the_whole_picture_of_a_run_is_the_one_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = pictures(monkeypatch)
    write_report(written(tmp_path / "run"))
    (figure,) = figures
    require_page("report/picture", figure_text(figure))


def test_a_picture_of_every_kind_of_panel_is_the_one_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = pictures(monkeypatch)
    x = np.arange(1.0, 41.0)
    curves = [
        Curve(name="a", colour="blue", x=x, y=x**2, style="dotted"),
        Curve(name="b", colour="red", x=x[:3], y=x[:3], style="diamonds"),
        Curve(name="c", colour="green", x=x[:1], y=x[:1], style="diamonds"),
        Curve(name="", colour="ink", x=x, y=np.full(40, np.nan), trend=x),
        Curve(name="e", colour="teal", x=x, y=x, style="points"),
    ]
    levels = [Level(name="bound", colour="ink", value=3.0)]
    level_panel = Panel(title="L", unit="u", curves=curves, levels=levels, log=True, overview=True)
    columns = Panel(
        title="C",
        unit="u",
        kind="columns",
        categories=[f"c{index}" for index in range(13)],
        curves=[
            Curve(name="one", colour="blue", x=x[:13], y=x[:13]),
            Curve(name="two", colour="red", x=x[:13], y=x[:13]),
        ],
        form="share",
        overview=True,
    )
    panels = [
        level_panel,
        columns,
        Panel(title="not drawn", unit="u"),
        Panel(title="E", unit="u", empty="nothing yet", overview=True),
        Panel(title="W", unit="u", form="whole", curves=curves[1:2], wide=True, overview=True),
        Panel(title="H", unit="u", form="whole", high=7.0, low=1.0, overview=True),
        Panel(title="S", unit="u", kind="stack", curves=curves[:1], overview=True),
        Panel(title="S0", unit="u", kind="stack", overview=True, x_range=(0.0, 3.0)),
    ]
    draw_sheet("all", [("first", "#000000"), ("second", "#ff0000")], panels, tmp_path / "x.png")
    draw_sheet("none", [], panels[:1], tmp_path / "y.png")
    require_page("report/panels", figure_text(figures[0]) + figure_text(figures[1]))


def test_statistics_of_columns_are_those_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a whole and of a thinned run are added in blocks."""
    for name, value in (("KEPT", 16), ("NEWEST", 8), ("BUCKETS", 8)):
        monkeypatch.setattr(metric_rows, name, value)
    shown: dict[str, Any] = {}
    for count in (13, 16, 17, 61):
        rows: list[MetricRow] = [
            {key: float(value) if value in ("nan", "inf") else value for key, value in one.items()}
            for one in (row_of(step, count) for step in range(1, count + 1))
        ]
        found = MetricRows()
        for start in range(0, count, 5):
            found.add(rows[start : start + 5])
        found.add([])
        shown[f"{count} rows"] = [len(found), found.total_rows, found.thinned, found[-1]["step"]]
        shown[f"{count} kept"] = [row["step"] for row in found]
        shown[f"{count} codes"] = dict(sorted(found.codes.items()))
        for key in ("reward/mean", "policy/grad_norm", "dropped/length_mean", "flow/dropped_late"):
            shown[f"{count} {key}"] = {
                "total": found.total(key),
                "mean": [found.mean(key), found.mean(key, weighted=True)],
                "ends": [found.largest(key), found.last(key), found.counted(key)],
                "curve": found.curve(key),
                "log": found.curve(key, log=True),
                "finite": found.finite(key),
                "cumulative": found.cumulative(key),
            }
        shown[f"{count} absent"] = [
            *(found.total("x"), found.mean("x"), found.largest("x"), found.last("x")),
            *(found.counted("x"), found.summed("x"), found.column("x"), found.cumulative("x")),
        ]
        shown[f"{count} summed"] = found.summed("lag/histogram")
    x = np.arange(100.0)
    y = np.where(x % 9 == 4, np.nan, np.sin(x))
    y[20:40] = np.inf
    shown["thin"] = [thin(x, y, maximum) for maximum in (1, 2, 7, 99, 100)]
    shown["smooth"] = [smooth(y[:count]) for count in (11, 12, 100)]
    require_page("report/statistics", listed(shown))


def test_short_spans_are_merged_into_the_longest_of_their_states() -> None:
    def spans(*lengths: tuple[str, float]) -> list[Span]:
        at, found = 0.0, []
        for state, seconds in lengths:
            found.append(Span(track="t", state=state, start=at, end=at + seconds))
            at += seconds
        return found

    for lengths, merged in (
        ((), []),
        ((("a", 1.0),), [("a", 0.0, 1.0)]),
        ((("a", 0.5),), [("a", 0.0, 0.5)]),
        ((("a", 0.25), ("b", 0.5), ("a", 0.125)), [("b", 0.0, 0.875)]),
        ((("a", 0.25), ("b", 0.75), ("a", 0.5)), [("b", 0.0, 1.0), ("a", 1.0, 1.5)]),
        (
            (("a", 0.25), ("b", 2.0), ("a", 0.5)),
            [("a", 0, 0.25), ("b", 0.25, 2.25), ("a", 2.25, 2.75)],
        ),
    ):
        assert list(merge_short(spans(*lengths), 1.0)) == merged


def test_numbers_are_formatted_as_on_the_page() -> None:
    assert [span(one) for one in (59.4, 59.5, 3599.4, 3599.5)] == [
        "0:59",
        "1:00",
        "59:59",
        "1:00:00",
    ]
    assert [percent(one) for one in (0.0, 0.5, 1 / 3, 1.0)] == ["0%", "50%", "33.3333%", "100%"]
    assert [tick(one) for one in (1e6, 123456.0, 1e-10)] == ["1e6", "123,456", "1e-10"]
