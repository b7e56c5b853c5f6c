"""The plot of a plan: peak memory, part upon part, and step time against the number of recomputed blocks."""

from __future__ import annotations

from html import escape
from pathlib import Path

from training_xpu.errors import UserError
from training_xpu.perf.plan_records import PlanDocument
from training_xpu.recompute.budget import unit_for
from training_xpu.records import write_atomically

SUFFIXES = (".html", ".htm")


def check_plot_path(path: Path) -> None:
    """
    Raises:
        UserError: it is no name of an HTML file in a folder that is there.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"--plot {path}: the plot is a web page", f"Such as: --plot {path.with_suffix('.html')}")
    if path.is_dir():
        raise UserError(f"--plot {path} is a folder", "Name a file in it.")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.parent}", "Make it first.")


def write_plot(document: PlanDocument, path: Path) -> None:
    """Writes one HTML file that needs nothing else, the network included.

    Raises:
        UserError: the file cannot be written.
    """
    page = plot_page(document)
    try:
        write_atomically(path, page)
    except OSError as error:
        raise UserError(f"cannot write --plot {path}: {error.strerror}") from error


def plot_page(document: PlanDocument) -> str:
    """The page: the figure, the same numbers as a table for those who cannot see it, and what they mean."""
    import plotly.graph_objects as go

    layers = [option.layers for option in document.options]
    unit = unit_for(document.largest_bytes)
    hover = f"%{{y:.2f}} {unit.name}"
    figure = go.Figure()
    for part in document.parts:
        sizes = [option.parts.get(part, 0) / unit.bytes for option in document.options]
        figure.add_bar(x=layers, y=sizes, name=part, hovertemplate=hover)
    figure.add_scatter(
        x=layers,
        y=[document.needed_bytes(option) / unit.bytes for option in document.options],
        mode="lines",
        name="live tensors" if document.budget_live else "95 % upper end of the peak",
        line={"dash": "dot", "color": "#444"},
        hovertemplate=hover,
    )
    ratios = [option.predicted_step_time_ratio for option in document.options]
    if all(ratio is not None for ratio in ratios):
        figure.add_scatter(
            x=layers,
            y=ratios,
            mode="lines+markers",
            name="step time",
            yaxis="y2",
            line={"color": "#000"},
            hovertemplate="%{y:.3f} x",
        )
    limit = "budget of live tensors" if document.budget_live else "memory of a rank"
    figure.add_hline(y=document.budget_bytes / unit.bytes, line={"color": "#c00"}, annotation_text=limit)
    if document.recommended_layers is not None:
        figure.add_vline(x=document.recommended_layers, line={"color": "#080"}, annotation_text="recommended")
    figure.update_layout(
        title=escape(title(document)),
        barmode="stack",
        bargap=0.1,
        hovermode="x unified",
        template="plotly_white",
        xaxis={"title": "recomputed blocks"},
        yaxis={"title": f"predicted peak of one rank in {unit.name}", "rangemode": "tozero"},
        yaxis2={"title": "step time over that without recompute", "overlaying": "y", "side": "right"},
        legend={"orientation": "h", "y": -0.15},
    )
    chart = figure.to_html(full_html=False, include_plotlyjs=True, div_id="plan")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title(document))}</title>\n"
        "<style>body{font-family:sans-serif;margin:2em}#plan{height:70vh}table{border-collapse:collapse}"
        "td,th{padding:.2em .8em;text-align:right}</style>\n</head>\n<body>\n"
        f"{chart}\n{_table(document)}\n"
        f"<p>Step time: {escape(document.step_time_source)}.</p>\n</body>\n</html>\n"
    )


def title(document: PlanDocument) -> str:
    """The workload and its setting in one line."""
    length = f" x {document.sequence_length} tokens" if document.sequence_length else ""
    stage = "" if document.zero_stage is None else f", ZeRO-{document.zero_stage}"
    ranks = "1 rank" if document.world_size == 1 else f"{document.world_size} ranks"
    batch = f"{document.micro_batch}{length}" if length else f"batch {document.micro_batch}"
    return f"{document.model}{stage}, {ranks}, {batch}, {document.dtype}"


def _table(document: PlanDocument) -> str:
    unit = unit_for(document.largest_bytes)
    heads = [f"{name} {unit.name}" for name in document.amount_names]
    rows = []
    for option in document.options:
        ratio = option.predicted_step_time_ratio
        cells = [
            str(option.layers),
            *(unit.number(size) for size in document.amounts(option)),
            "unknown" if ratio is None else f"{ratio:.3f}",
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(cell)}</th>" for cell in ("recomputed", *heads, "step time"))
    return f"<details><summary>As a table</summary><table><tr>{head}</tr>{''.join(rows)}</table></details>"
