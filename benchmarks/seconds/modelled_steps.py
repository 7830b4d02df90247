"""Model the seconds of a training step of large models over links from 100 Gb/s to 100 Mb/s.

These steps are not measured: cost_model.py computes their seconds, and limited_links.py tests it on
small models. Compute is 6 operations per parameter and token at a given share of a GPU's peak, the
same for all methods, plus the optimizer's products.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.model_shapes import MODELS
from benchmarks.common.records import RESULTS, between_markers, write
from benchmarks.seconds import link_predictions
from benchmarks.seconds.cost_model import (
    DELAYED,
    METHODS,
    Link,
    Method,
    Products,
    Shapes,
    collective_seconds,
    compute_seconds,
    ddp,
    opening_products,
    openings,
    polar_products,
    power_iteration_products,
    products_of,
    quarter_products,
    step_seconds,
)

Record = dict[str, Any]

H100_BF16 = 989e12  # operations per second, dense
# Operations per second of an H100 SXM without sparsity, by dtype.
PEAKS = {"float16": H100_BF16, "float32": 67e12, "float64": 67e12}
GPUS = {"gpt2-160m": 1, "llama-1.3b": 1, "llama-8b": 8}  # GPUs of a replica
# Slower links are usually longer.
LINKS = {
    "100 Gb/s": Link(100e9, 10e-6),
    "10 Gb/s": Link(10e9, 50e-6),
    "1 Gb/s": Link(1e9, 1e-3),
    "100 Mb/s": Link(100e6, 20e-3),
}
AFFORDABLE = 1.1  # times the seconds of work
TRAINING = ("llama-1.3b", 26e9)  # model, and tokens of all replicas together
DAY = 86400.0

DOCUMENT = RESULTS / "scaling" / "README.md"
MEASURED = RESULTS / "scaling" / "link.json"


@dataclass(frozen=True)
class Setting:
    """Assumptions of the model.

    Attributes:
        replicas: how many. tokens: of each replica at a step.
        peak_share: share of a GPU's bfloat16 peak that compute reaches.
        overlap: share of the backward pass during which DDP communicates.
    """

    replicas: int = 8
    tokens: int = 65536
    peak_share: float = 0.4
    overlap: float = 1.0


def records(setting: Setting) -> list[Record]:
    """Return a record for every model, link and method."""
    return [
        _record(model, name, method, setting)
        for model in GPUS
        for name in LINKS
        for method in METHODS
    ]


def _record(model: str, link_name: str, method: Method, setting: Setting) -> Record:
    """Return the modelled step of one method.

    Args:
        model: a key of MODELS.
        link_name: a key of LINKS, between replicas.
        method: the way to train.
        setting: the assumptions.
    """
    shapes, between = Shapes.of(MODELS[model]), LINKS[link_name]
    traffic, n = method.traffic(shapes), setting.replicas
    compute = _compute(model, shapes, setting)
    optimizer = _products_seconds(model, method.products(shapes), setting)
    overlap = setting.overlap if method.overlaps else 0.0
    beside = method.beside(shapes)
    sent = sum(t.sent(n) for t in traffic)
    return {
        "model": model,
        "link": link_name,
        "bandwidth": between.bandwidth,
        "latency": between.latency,
        "method": method.name,
        "overlap": overlap,
        "delay": method.delay(shapes),
        "beside": beside,
        "calls": sum(t.calls for t in traffic),
        "sent_bytes": sent,
        "share_of_ddp": sent / sum(t.sent(n) for t in ddp(shapes)),
        "compute_seconds": compute,
        "optimizer_seconds": optimizer,
        "communication_seconds": sum(collective_seconds(t, between, n) for t in traffic),
        "step_seconds": step_seconds(
            compute, traffic, between, n, optimizer=optimizer, overlap=overlap, beside=beside
        ),
    }


def optimizer_shares(setting: Setting) -> list[Record]:
    """Return the time of optimizers' products over forward and backward, by model and step."""
    found = []
    for model in GPUS:
        shapes = Shapes.of(MODELS[model])
        period = 1 / openings(shapes, 0.01)
        steps: dict[str, Callable[[int, int], Products]] = {
            "local step, polar": polar_products,
            "what an opening adds": opening_products,
            "local step, power iteration of full rank": lambda m, n: power_iteration_products(
                m, n, min(m, n), qr=True
            ),
            "Dion, rank 1/4": quarter_products,
        }
        for name, each in steps.items():
            products = products_of(shapes, each)
            seconds = _products_seconds(model, products, setting)
            share = seconds / _compute(model, shapes, setting)
            found.append(
                {"model": model, "what": name, "products": products, "share_of_compute": share}
                | {"steps_per_opening": period}
            )
    return found


def shares_table(found: Sequence[Record]) -> str:
    """Return a table of these shares, by model."""
    models = _unique(found, "model")
    lines = [_row(["", *models]), _row(["---"] * (1 + len(models)))]
    for what in _unique(found, "what"):
        cells = [r["share_of_compute"] for r in found if r["what"] == what]
        lines.append(_row([what, *(f"{share:.1%}" for share in cells)]))
    return "\n".join(lines)


def _compute(model: str, shapes: Shapes, setting: Setting) -> float:
    speed = GPUS[model] * setting.peak_share * H100_BF16
    return compute_seconds(shapes.parameters, setting.tokens, speed)


def _products_seconds(model: str, products: Products, setting: Setting) -> float:
    """Return the seconds; the GPUs of a replica share all work, also on n x n matrices."""
    gpus = GPUS[model] * setting.peak_share
    return sum(count / (gpus * PEAKS[dtype]) for dtype, count in products.items())


# ---------------------------------------------------------------- tables


def affordable(found: Sequence[Record]) -> str:
    """Return, for a model and link, the method that sends most among those that hardly wait.

    Those take at most ``AFFORDABLE`` times their work (compute and the optimizer's products); if
    none does, the fastest. Among methods within 1 % of the bytes, one without a delay wins.
    """
    kept = [r for r in found if r["step_seconds"] <= AFFORDABLE * _work(r)]
    if kept:
        most = max(r["sent_bytes"] for r in kept)
        return str(next(r["method"] for r in kept if r["sent_bytes"] >= 0.99 * most))
    best = min(found, key=itemgetter("step_seconds"))
    return f"{best['method']} ({best['step_seconds'] / _work(best):.1f} × work)"


def _work(record: Record) -> float:
    return float(record["compute_seconds"] + record["optimizer_seconds"])


def fastest(found: Sequence[Record]) -> str:
    """Return, for a model and link, the methods whose step is within 1 % of the shortest."""
    least = min(r["step_seconds"] for r in found)
    names = [r["method"] for r in found if r["step_seconds"] <= 1.01 * least]
    return "all alike" if len(names) == len(found) else "; ".join(names)


def markdown(found: Sequence[Record]) -> str:
    """Return tables of the seconds of a step, and of the recommended methods."""
    parts = []
    for model in _unique(found, "model"):
        here = [r for r in found if r["model"] == model]
        compute = here[0]["compute_seconds"]
        parts.append(f"**{model}**: compute {_seconds(compute)} s a step\n")
        links = _unique(here, "link")
        parts.append(_row(["method", "sent a step", "of DDP's", "optimizer, s", *links]))
        parts.append(_row(["---"] * (4 + len(links))))
        for method in _unique(here, "method"):
            cells = [r for r in here if r["method"] == method]
            sent, share = cells[0]["sent_bytes"], cells[0]["share_of_ddp"]
            seconds = [_seconds(r["step_seconds"]) for r in cells]
            spent = _seconds(cells[0]["optimizer_seconds"])
            parts.append(_row([method, f"{sent / 1e6:,.0f} MB", f"{share:.1%}", spent, *seconds]))
        parts.append("")
    parts += _choices(found)
    return "\n".join(parts)


def _choices(found: Sequence[Record]) -> list[str]:
    lines = [
        _row(["model", "link", "shortest step", f"sends most, at ≤ {AFFORDABLE} × work"]),
        _row(["---"] * 4),
    ]
    for model in _unique(found, "model"):
        for name in _unique(found, "link"):
            here = [r for r in found if (r["model"], r["link"]) == (model, name)]
            lines.append(_row([model, name, fastest(here), affordable(here)]))
    return lines


def days_table(found: Sequence[Record], setting: Setting) -> str:
    """Return a table of the days of a whole training run, by method and link."""
    model, tokens = TRAINING
    steps = tokens / (setting.replicas * setting.tokens)
    here = [r for r in found if r["model"] == model]
    links = _unique(here, "link")
    lines = [_row(["method", *links]), _row(["---"] * (1 + len(links)))]
    for method in _unique(here, "method"):
        days = [steps * r["step_seconds"] / DAY for r in here if r["method"] == method]
        lines.append(_row([method, *map(_seconds, days)]))
    alone = _seconds(steps * here[0]["compute_seconds"] / DAY)
    return "\n".join([*lines, _row(["compute alone", *[alone] * len(links)])])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _unique(found: Sequence[Record], key: str) -> list[str]:
    return list(dict.fromkeys(r[key] for r in found))


def _seconds(seconds: float) -> str:
    """Format with three digits, or all before the decimal point."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def rewritten(document: str, tables: Mapping[str, str]) -> str:
    """Return the document with each table inserted between its markers."""
    for name, table in tables.items():
        begin = f"<!-- {name}: made by benchmarks/seconds/modelled_steps.py -->"
        end = f"<!-- {name}: end -->"
        document = between_markers(document, begin, end, table)
    return document


def tables(
    setting: Setting, found: Sequence[Record], shares: Sequence[Record], measured: Record
) -> dict[str, str]:
    """Return all tables of the document: the model's, and limited_links.py's measurements.

    Args:
        setting: the assumptions.
        found: modelled steps.
        shares: of optimizers, from :func:`optimizer_shares`.
        measured: the record of limited_links.py.
    """
    return {
        "model": markdown(found),
        "days": days_table(found, setting),
        "optimizer": shares_table(shares),
        "costs": _costs(measured),
        "link": link_predictions.table(measured["steps"]),
    }


def _costs(measured: Record) -> str:
    lines = [_row(["collective", "replicas", "rounds, × a ring's", "bytes, × a ring's"])]
    lines.append(_row(["---"] * 4))
    for cost in sorted(measured["costs"], key=itemgetter("kind", "ranks")):
        cells = [cost["kind"], str(cost["ranks"]), f"{cost['rounds']:.2f}", f"{cost['bytes']:.3f}"]
        lines.append(_row(cells))
    return "\n".join(lines)


def plot(found: Sequence[Record], path: Path) -> None:
    """Draw the seconds of a step over bandwidth, by method, with one panel per model.

    A method with a delay is dashed, in the colour of the same method without one.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = _unique(found, "model")
    size = (4.4 * len(models), 5.0)
    figure, places = pyplot.subplots(1, len(models), figsize=size, layout="constrained")
    for axes, model in zip(places, models, strict=True):
        here = [r for r in found if r["model"] == model]
        names = _unique(here, "method")
        undelayed = [name for name in names if not name.endswith(DELAYED)]
        for method in names:
            points = [r for r in here if r["method"] == method]
            bandwidths = [r["bandwidth"] for r in points]
            axes.loglog(
                bandwidths,
                [r["step_seconds"] for r in points],
                "o-" if method in undelayed else "s--",
                color=f"C{undelayed.index(method.removesuffix(DELAYED))}",
                markersize=4,
                label=method,
            )
        axes.axhline(here[0]["compute_seconds"], color="grey", ls=":", label="compute alone")
        axes.set_xticks(bandwidths, _unique(here, "link"))
        axes.set_xlabel("between replicas")
        axes.set_title(model)
    places[0].set_ylabel("seconds a step, modelled")
    figure.legend(*places[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def command_line() -> argparse.ArgumentParser:
    """The options."""
    default = Setting()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=default.replicas)
    parser.add_argument("--tokens", type=int, default=default.tokens, help="per replica and step")
    parser.add_argument(
        "--peak-share",
        type=float,
        default=default.peak_share,
        help="compute's share of an H100's bfloat16 peak",
    )
    parser.add_argument(
        "--overlap",
        type=float,
        default=default.overlap,
        help="share of the backward pass that DDP overlaps",
    )
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--plot", type=Path, help="picture of the records")
    parser.add_argument("--document", action="store_true", help=f"rewrite {DOCUMENT.name}'s tables")
    return parser


def main() -> None:
    """Model what the command line asks for."""
    options = command_line().parse_args()
    setting = Setting(options.replicas, options.tokens, options.peak_share, options.overlap)
    found, shares = records(setting), optimizer_shares(setting)
    print(markdown(found))
    print(days_table(found, setting))
    print(shares_table(shares))
    if options.output is not None:
        write(options.output, torch.device("cpu"), [{"setting": vars(setting)}, *found])
        write(options.output.with_name("optimizer.json"), torch.device("cpu"), shares)
    if options.plot is not None:
        plot(found, options.plot)
    if options.document:
        (measured,) = json.loads(MEASURED.read_text("utf-8"))["records"]
        document = rewritten(DOCUMENT.read_text("utf-8"), tables(setting, found, shares, measured))
        DOCUMENT.write_text(document, encoding="utf-8")


if __name__ == "__main__":
    main()
