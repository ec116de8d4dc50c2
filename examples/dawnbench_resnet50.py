"""Train a ResNet as DAWNBench's fastest entries did: pictures that grow, LARS, sparse gradients first.

mpirun -np 4 --oversubscribe python examples/dawnbench_resnet50.py small --output out/recipe
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import typer
from resnet50 import settings as known

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    settings: Annotated[str, typer.Argument(help=f"A preset ({', '.join(known.presets())}) or a YAML file.")],
    output: Annotated[Path, typer.Option(help="Results and checkpoints; a training in it goes on.")] = Path(
        "out/recipe"
    ),
    data: Annotated[str, typer.Option(help="A folder of pictures, procedural or synthetic.")] = "",
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value; may be given again.")
    ] = None,
) -> None:
    """Train, or go on with the training in the output folder."""
    try:
        chosen = known.read(settings, [*([f"data.source={data}"] if data else []), *(changes or [])])
        from resnet50 import training

        import hvd_ext as hvd

        hvd.init(hvd.Options(algorithm=chosen.algorithm))
        kinds = tuple("dense" if phase.compression == "auto" else phase.compression for phase in chosen.phases)
        status = training.train(chosen, kinds, output)
        hvd.shutdown()
    except known.SettingsError as error:
        typer.echo(f"dawnbench_resnet50: {error}", err=True)
        sys.exit(2)
    sys.exit(status)


if __name__ == "__main__":
    app()
