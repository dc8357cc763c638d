"""The demo from start to end, with progress bars."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tierkv.bench import require
from tierkv.bench.demo import model, report
from tierkv.bench.demo.check import check
from tierkv.bench.demo.parent import plan, run_child
from tierkv.bench.demo.scenario import EngineResult, EngineRun, Message, Progressed, Scenario, Started


def run_demo(scenario: Scenario, output_dir: Path, json_file: Path | None) -> bool:
    """Run all engines, then print, draw and write. Returns whether the outputs are those without offload.

    Raises:
        MissingExtraError: something that the demo needs is not installed.
        BenchError: an engine failed.
    """
    require(["vllm", "torch", "matplotlib"], f"to install: {model.INSTALL}")
    console = Console()
    logs = output_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with console.status("the model's folder: about twenty seconds the first time"):
        folder = model.model_folder()
    results = _run_all(plan(scenario, folder), logs, console)
    demo = report.Demo(scenario=scenario, results=results, check=check(results))
    report.print_tables(demo, console)
    chart = output_dir / "throughput.png"
    report.write_chart(demo, chart)
    console.print(f"chart: {chart}")
    if json_file is not None:
        report.write_json(demo, json_file)
        console.print(f"figures: {json_file}")
    return demo.check.passed


def _run_all(runs: list[EngineRun], logs: Path, console: Console) -> list[EngineResult]:
    columns = (
        TextColumn("{task.fields[pool]:>3} conversations, {task.fields[mode]:<13}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {
            (run.pool, run.mode): progress.add_task(
                "", total=_prompts(run), start=False, pool=run.pool, mode=run.mode, state=""
            )
            for run in runs
        }

        def on_message(run: EngineRun, message: Message) -> None:
            task = tasks[run.pool, run.mode]
            if isinstance(message, Started):
                progress.update(task, state="")
            elif isinstance(message, Progressed):
                progress.advance(task)

        results = []
        for run in runs:
            task = tasks[run.pool, run.mode]
            progress.start_task(task)
            progress.update(task, state="engine starts")
            results.append(run_child(run, logs, on_message))
            progress.stop_task(task)
        return results


def _prompts(run: EngineRun) -> int:
    """Requests of one run: each probe is sent twice, and once more without offload."""
    return run.pool * run.scenario.rounds + run.scenario.probes * (2 if run.offloaded else 3)
