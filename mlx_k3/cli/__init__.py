"""The ``mlx-k3`` command: one file per subcommand, one place where errors become exit codes.

Nothing here imports mlx: ``mlx-k3 --help`` answers at once, and a command imports what it needs
when it runs. Exit codes: 0 done, 2 bad input (one line, no traceback), 130 Ctrl-C.
"""

import gc
import os
import sys

import typer

from ..errors import K3Error
from .bench import bench
from .chat import chat
from .convert import convert
from .doctor import doctor
from .eval import evaluate
from .generate import generate
from .inspect import inspect
from .plan import plan
from .serve import serve
from .sessions import sessions
from .trace import trace
from .train import train
from .verify import verify

app = typer.Typer(
    name="mlx-k3",
    help="Run Kimi K3 on your own machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def entry() -> None:
    """Entry point of the console script and of ``python -m mlx_k3``."""
    try:
        return main()
    except SystemExit as e:
        if e.code != 130:
            raise
    # At once: taking the interpreter down while threads of MLX still work can abort it, and
    # everything that must be kept is on the disk already. Only locks shared with other processes
    # have to be given back, which the frames of the error held until now.
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


def main() -> None:
    """Run the command; ends in SystemExit with the exit code."""
    try:
        app()
    except K3Error as e:
        print(f"mlx-k3: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    except ImportError as e:
        # On Linux plain `mlx` comes without a backend: libmlx.so is missing.
        if "libmlx" not in str(e):
            raise
        advice = "install mlx-k3[cpu], mlx-k3[cuda12] or mlx-k3[cuda13]"
        print(f"mlx-k3: MLX has no backend here ({e}); {advice}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of our output left (`mlx-k3 inspect | head`): nothing to report to anyone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


app.command()(bench)
app.command()(chat)
app.command()(convert)
app.command()(doctor)
app.command("eval")(evaluate)
app.command()(generate)
app.command()(inspect)
app.command()(plan)
app.command()(serve)
app.command()(sessions)
app.command()(trace)
app.command()(train)
app.command()(verify)
