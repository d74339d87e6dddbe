"""``mlx-k3 serve``: OpenAI's HTTP interface to a model."""

from pathlib import Path
from typing import Annotated

import typer

from ..config import K3Config
from ..errors import CheckpointError, K3Error
from ..units import parse_bytes
from . import loading
from .chat import recommended_sampling
from .prompts import open_prompts
from .terminal import note

_NETWORK = "Who may ask"


def serve(
    model: loading.ModelArgument = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on.", rich_help_panel=_NETWORK)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(help="The port; 0 for any free one.", min=0, max=65535),
    ] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="MLX_K3_API_KEY",
            help="What a client must know to be answered. The variable keeps it out of the list "
            "of processes.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    without_key: Annotated[
        bool,
        typer.Option(
            "--without-key",
            help="Let other machines in without a key, with a --host that they reach.",
            rich_help_panel=_NETWORK,
        ),
    ] = False,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            help="A web page's origin that may ask, as http://localhost:3000, or *; repeat for "
            "more. Without: none.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    allow_files: Annotated[
        Path | None,
        typer.Option(
            help="Let requests name pictures in this folder, as file:///FOLDER/photo.jpg. Without: "
            "they bring their pictures.",
            metavar="FOLDER",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    allow_urls: Annotated[
        bool,
        typer.Option(
            "--allow-urls",
            help="Fetch pictures from the addresses that requests name, in this network too.",
            rich_help_panel=_NETWORK,
        ),
    ] = False,
    max_body: Annotated[
        str, typer.Option(help="The largest request.", rich_help_panel=_NETWORK)
    ] = "32MB",
    max_queue: Annotated[
        int,
        typer.Option(
            help="How many requests may wait beside the one that is answered.",
            min=0,
            rich_help_panel=_NETWORK,
        ),
    ] = 64,
    max_tokens: Annotated[
        int, typer.Option(help="Stop an answer after this many tokens if a request has no limit.")
    ] = 4096,
    temp: Annotated[
        float | None,
        typer.Option(
            help="Temperature if a request has none. Default: the model's "
            "generation_config.json, else 1."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample among the likeliest tokens of this total probability if a request does "
            "not say. Default: the model's generation_config.json, else 1."
        ),
    ] = None,
    memory: loading.MemoryOption = None,
    context: loading.ContextOption = None,
    policy: loading.PolicyOption = None,
    no_prefetch: loading.NoPrefetchOption = False,
    active_experts: loading.ActiveExpertsOption = None,
    drop_missed: loading.DropMissedOption = None,
    trace: loading.TraceOption = None,
    activations: loading.ActivationsOption = None,
    kv: loading.KvOption = None,
    no_vision: loading.NoVisionOption = False,
) -> None:
    """Answer requests over HTTP, as OpenAI's API does.

    Chat completions with thinking, tools and JSON schemas, completions, the model, /health, and
    /metrics for Prometheus. One request is answered at a time, the others wait. Ctrl-C ends it;
    SIGTERM answers first what was accepted.

    Examples:

        mlx-k3 serve

        mlx-k3 serve ~/kimi-k3-mlx --memory 96GB --context 32k

        mlx-k3 serve ~/kimi-k3-mlx --origin http://localhost:3000

        MLX_K3_API_KEY=secret mlx-k3 serve ~/kimi-k3-mlx --host 0.0.0.0
    """
    how = loading.Loading(
        memory,
        context,
        policy,
        no_prefetch,
        active_experts,
        drop_missed,
        trace,
        activations,
        kv,
        no_vision,
    )
    max_body_bytes = parse_bytes(max_body)
    if api_key == "":
        raise K3Error("--api-key is empty")
    folder = loading.model_folder(model)
    _check_sources(K3Config.from_file(folder), allow_files, allow_urls, no_vision)
    recommended = recommended_sampling(folder)

    from ..chat.generation import Sampling
    from ..server.app import Limits, Service
    from ..server.asks import Defaults
    from ..server.pictures import Sources
    from ..server.run import bind, url_of
    from ..server.run import serve as answer

    temp = recommended["temperature"] if temp is None else temp
    top_p = recommended["top_p"] if top_p is None else top_p
    Sampling(max_tokens, temp, top_p)  # Refuses bad values now: loading may take minutes.
    listener = bind(host, port, has_key=api_key is not None, open_to_all=without_key)
    with loading.open_model(folder, how, keeps_prompts=True) as (network, tokenizer):
        if tokenizer is None:
            raise CheckpointError(f"{folder} has no tokenizer; requests have text")
        service = Service(
            network,
            tokenizer,
            name="k3-nano" if model is None else folder.resolve().name,
            created=int((folder / "config.json").stat().st_mtime),
            prompts=open_prompts(folder, network),
            most_waiting=max_queue,
            defaults=Defaults(max_tokens, temp, top_p),
            sources=Sources(allow_files, allow_urls),
        )
        limits = Limits(api_key, tuple(origin or ()), max_body_bytes)
        ready = f"{service.name} answers at {url_of(listener)}"
        interrupted = answer(service, limits, listener, lambda: note(ready))
    if interrupted:
        raise KeyboardInterrupt


def _check_sources(config: K3Config, folder: Path | None, urls: bool, no_vision: bool) -> None:
    option = "--allow-files" if folder is not None else "--allow-urls" if urls else None
    if option is not None and (no_vision or config.vision_config is None):
        raise K3Error(f"{option}: the model would see no pictures; leave it out")
    if folder is not None and not folder.is_dir():
        raise K3Error(f"--allow-files {folder}: there is no such folder")
