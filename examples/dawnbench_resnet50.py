"""Train a ResNet as DAWNBench's fastest entries did: pictures that grow, LARS, sparse gradients first.

mpirun -np 4 --oversubscribe python examples/dawnbench_resnet50.py small --output out/recipe
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import typer
from resnet50 import settings as known

from hvd_ext.commands.app import table_console
from hvd_ext.errors import HvdExtError
from hvd_ext.job import runtime
from hvd_ext.options import from_environment

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    settings: Annotated[str, typer.Argument(help=f"A preset ({', '.join(known.presets())}) or a YAML file.")],
    output: Annotated[Path, typer.Option(help="Results and checkpoints; a training in it goes on.")] = Path(
        "out/recipe"
    ),
    data: Annotated[str, typer.Option(help="A folder of pictures, or synthetic.")] = "",
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value; may be given again.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the predicted price, with the cluster of --topology.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Only measure the rates of this device, with --data, for price.rates.")
    ] = False,
    topology: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The cluster, as docs/topology.md describes it.")
    ] = None,
    price_per_hour: Annotated[float | None, typer.Option(min=0, help="With --dry-run: of one host.")] = None,
    host_memory: Annotated[
        bool, typer.Option("--host-memory", help="With --dry-run: hosts add in shared memory, not between devices.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="With --dry-run: write it.")] = None,
) -> None:
    """Train, or go on with the training in the output folder."""
    try:
        chosen = known.read(settings, [*([f"data.source={json.dumps(data)}"] if data else []), *(changes or [])])
        from resnet50 import calibration, price, training

        import hvd_ext as hvd

        if dry_run:
            if topology is None:
                raise known.SettingsError("--dry-run: needs the cluster, --topology FILE")
            price.dry_run(
                chosen,
                topology,
                table_console(),
                price_per_hour=price_per_hour,
                host_memory=host_memory,
                json_file=json_file,
            )
            return
        if calibrate:
            hvd.init(from_environment().replace(quiet=True))
            hvd.pin_gpu()
            calibration.show(chosen, topology, typer.echo)
            hvd.shutdown()
            return
        hvd.init(training.options(chosen, topology))
        hvd.pin_gpu()
        kinds = price.kinds(chosen, runtime.current().tree)
        status = training.train(chosen, kinds, output)
        hvd.shutdown()
    except (known.SettingsError, HvdExtError) as error:
        typer.echo(f"dawnbench_resnet50: {error}", err=True)
        sys.exit(2)
    sys.exit(status)


if __name__ == "__main__":
    app()
