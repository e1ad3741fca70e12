"""The ``sshsdp`` command. ``sshsdp plan`` says what a run will need before it is started."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError as error:
    raise SystemExit(
        "the sshsdp command needs typer: pip install 'sshsdp[plan]' (or pip install typer)"
    ) from error

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)


@app.callback()
def _commands() -> None:
    """Keep ``plan`` a subcommand while it is the only one."""


def _parse_mesh(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", text.strip().lower())
    if match is None or int(match[1] or 1) < 1 or int(match[2]) < 1:
        raise ValueError(f"--mesh must be RxS, such as 16x8, or S, such as 8; got {text!r}")
    return int(match[1] or 1), int(match[2])


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Option(
            help="Hugging Face config (JSON file or directory), or module:function, which returns "
            "the model. It is built on the meta device."
        ),
    ],
    mesh: Annotated[str, typer.Option(help="replicate x shard, such as 16x8, or shard alone.")],
    optimizer: Annotated[str, typer.Option(help="What keeps the optimizer state.")] = "adamw",
    runtime_format: Annotated[
        str, typer.Option("--format", help="Runtime format: bf16, fp16, fp32 or mxfp8.")
    ] = "bf16",
    hardware: Annotated[str, typer.Option(help="H100, H200, B200 or a JSON file.")] = "H100",
    batch: Annotated[
        int | None, typer.Option(help="Sequences per rank and micro-batch; with --seq.")
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    checkpoint_activations: Annotated[
        bool, typer.Option(help="Recompute activations block by block.")
    ] = False,
    sharding: Annotated[
        str, typer.Option(help="Update sharding: hierarchical or replicated.")
    ] = "hierarchical",
    update_device: Annotated[
        str | None, typer.Option(help="cpu: masters and optimizer state on the host.")
    ] = None,
    unit: Annotated[
        list[str] | None,
        typer.Option(
            help="Name pattern of modules that are gathered as one unit, such as "
            "'model.layers.*'; may be given several times. Default: every block."
        ),
    ] = None,
    packs: Annotated[
        bool, typer.Option(help="Pack sibling projections, as sshsdp.find_packs does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the address space of a unit and the memory bars.")
    ] = None,
) -> None:
    """Memory, bytes on the wire and time per step, beside FSDP2's and classic HSDP's."""
    # Not at the top: `sshsdp --help` should not wait for torch.
    from rich.console import Console

    from sshsdp.estimate.hardware import find_hardware
    from sshsdp.estimate.loading import load_model
    from sshsdp.estimate.optimizers import optimizer_cost
    from sshsdp.estimate.plan import make_plan
    from sshsdp.estimate.step_time import Batch
    from sshsdp.estimate.tables import plan_tables
    from sshsdp.packs import find_packs
    from sshsdp.policies import UpdatePolicy

    try:
        if (batch is None) != (seq is None):
            raise ValueError("--batch and --seq go together")
        work = None
        if batch is not None and seq is not None:
            work = Batch(
                size=batch,
                sequence=seq,
                num_micro_batches=micro_batches,
                is_checkpointed=checkpoint_activations,
            )
        module = load_model(model)
        made = make_plan(
            module,
            model_name=_short_name(model),
            mesh=_parse_mesh(mesh),
            optimizer=optimizer_cost(optimizer),
            runtime_format=runtime_format,
            hardware=find_hardware(hardware),
            batch=work,
            # The policy checks both values.
            update=UpdatePolicy(sharding=sharding, device=update_device),  # type: ignore[arg-type]
            units=tuple(unit) if unit else None,
            packs=find_packs(module) if packs else (),
        )
        if plot is not None:
            from sshsdp.estimate.drawing import draw_plan

            draw_plan(made, plot)
    except (RuntimeError, ValueError) as error:
        typer.echo(f"sshsdp plan: {error}", err=True)
        raise typer.Exit(code=2) from error
    if as_json:
        json.dump(made.to_dict(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        Console().print(plan_tables(made))


def _short_name(model: str) -> str:
    path = Path(model)
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.is_file() else model


def main() -> None:
    """Entry point of the console script."""
    app()
