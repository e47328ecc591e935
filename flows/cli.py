"""The `rlhf` command."""

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer
from rich.console import Console
from rich.markdown import Markdown

from flows import follow, services
from flows.api import Api
from flows.doctor import examine
from flows.openrlhf.importing import import_command
from flows.openrlhf.shell import from_arguments
from flows.plan_table import plan_markdown, plan_tables
from flows.services import Services, ServicesError
from flows.store_commands import gc, lineage, verify
from flows.terminal import one_line_errors
from rlhf_core.config.base import parse_settings
from rlhf_core.config.pipeline import SECTION_DATA, RunSettings, load_pipeline, read_pipeline
from rlhf_core.store.artifacts import read_manifest
from rlhf_core.store.keys import directory_digest
from rlhf_core.store.store import Store
from stages.plan import PlannedStage, plan_pipeline
from stages.reasons import explain
from stages.resources import estimate

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console()

PipelineFile = Annotated[Path, typer.Argument(help="A pipeline file, such as deployments/pipelines/demo.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="A dotted override, e.g. ppo.optimizer.lr=1e-6; repeatable.")
]


class RunFailed(Exception):
    """The run did not complete. The message is its first cause, one line."""


@app.command()
def up(
    port: Annotated[int | None, typer.Option(help="The server's port on 127.0.0.1; 4200 by default.")] = None,
) -> None:
    """Start this folder's Prefect server, its work pools with a worker each, and the deployments."""
    with one_line_errors():
        result = services.up(Path.cwd(), port)
        services.wait_workers(services.Place(Path.cwd()), result.services)
    console.print(f"started: {', '.join(result.started)}" if result.started else "already up")
    console.print(f"Prefect UI: {result.services.ui}")
    for variable in services.overriding_variables():
        console.print(f"note: {variable} is set in this shell and wins over prefect.toml; unset it for `prefect`")


@app.command()
def down() -> None:
    """Cancel live runs, wait for them, and stop what `rlhf up` started."""
    with one_line_errors():
        stopped = services.down(Path.cwd())
    console.print(f"stopped: {', '.join(stopped)}" if stopped else "nothing was up")


@app.command()
def plan(
    pipeline: PipelineFile,
    overrides: Overrides = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="As markdown.")] = False,
) -> None:
    """Say what a run would do with each stage, why, and what that takes. Starts nothing."""
    with one_line_errors():
        settings = load_pipeline(pipeline, overrides or [])
        planned, store = plan_pipeline(settings), Store(settings.run.store)
        explained, takes = explain(planned, store), estimate(planned, store)
    if markdown:
        typer.echo(plan_markdown(explained, takes), nl=False)
    else:
        console.print(plan_tables(explained, takes))


@app.command()
def run(pipeline: PipelineFile, overrides: Overrides = None) -> None:
    """Run a pipeline file on the server that `rlhf up` started, and follow it. Ctrl-C leaves the run alone."""
    with one_line_errors(RunFailed):
        running = services.running(Path.cwd())
        if running is None:
            raise ServicesError("no Prefect server runs for this folder; start one with `rlhf up`")
        try:
            _run_and_report(running, pipeline, overrides or [])
        except KeyboardInterrupt:
            console.print("the run goes on; cancel it in the UI or with `prefect flow-run cancel`")
            raise


@app.command()
def demo() -> None:
    """SFT, reward model and PPO on this machine: uses a running server, or starts one and stops it again."""
    started = time.monotonic()
    project = Path.cwd()
    pipeline = next(file for file in services.shipped_pipelines() if file.stem == "demo")
    with one_line_errors(RunFailed):
        running = services.running(project)
        own = False
        try:
            if running is None:
                console.print("starting a Prefect server and its workers")
                result = services.up(project)
                # A server that lives but answered too late is somebody else's.
                own = "server" in result.started
                running = result.services
            memory = follow.MemoryPeak(lambda: list(running.processes.values()))
            memory.start()
            try:
                _run_and_report(running, pipeline, [])
            finally:
                memory.stop()
                console.print(f"peak memory of all processes: {memory.peak_bytes / 2**30:.1f} GiB")
        finally:
            if own:
                services.down(project)
            console.print(f"wall time: {time.monotonic() - started:.0f} s")


@app.command()
def merge_lora(
    base: Annotated[Path, typer.Option(help="Directory of the model that the adapter was trained on.")],
    adapter: Annotated[Path, typer.Option(help="Directory of the adapter, such as MODEL/adapter.")],
    out: Annotated[Path, typer.Option(help="New directory for the merged model and its tokenizer.")],
    any_base: Annotated[bool, typer.Option("--any-base", help="Take any base.")] = False,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Of the weights.")] = None,
) -> None:
    """Merge a LoRA adapter into its base model, causal or reward; checked before it is written."""
    # Imported here: no other command needs torch.
    from rlhf_core.models.export import merge_adapter, silence_transformers

    silence_transformers()
    with one_line_errors():
        digest = None if any_base else directory_digest(base)
        merged = merge_adapter(base, adapter, out, base_digest=digest, dtype=dtype)
    error = f"outputs differ from base and adapter by {merged.difference:.1e} (relative)"
    console.print(f"{out}: merged {merged.kind} model; {error}", soft_wrap=True)


@app.command()
def replay(
    key: Annotated[str, typer.Argument(help="Key of a run of ppo that had ppo.dump_rollouts, or its beginning.")],
    out: Annotated[Path, typer.Option(help="New directory for model, metrics and plots.")],
    store: Annotated[str, typer.Option(help="Directory or s3:// URL of the store.")] = ".rlhf/store",
    overrides: Overrides = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Rollouts; up to the exported step by default.")] = None,
) -> None:
    """Train again on the rollouts that a run kept, without a sampler and without the server."""
    # Imported here: plan and the like need no torch.
    from rlhf_core.cluster.session import ClusterError
    from stages.contract import ContractError
    from stages.replay import replay as replay_run

    with one_line_errors(ClusterError, ContractError):
        made = replay_run(Store(store), key, out, overrides or [], steps=steps)
    compared = {True: ", the same as the run's to the bit", False: ", another than the run's", None: ""}[made.same]
    console.print(f"{made.model}: trained on {made.steps} rollouts{compared}", soft_wrap=True)


@app.command()
def serve_reward(
    model: Annotated[Path, typer.Option(help="Directory of a reward model or a process reward model.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: a free one.")] = 5000,
    token_env: Annotated[str, typer.Option(help="Environment variable with the token.")] = "RLHF_REWARD_TOKEN",
    no_token: Annotated[bool, typer.Option("--no-token", help="Ask for none; on the loopback alone.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda, cpu, ...; cuda where there is one.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the weights.")] = "bfloat16",
    max_tokens: Annotated[int | None, typer.Option(help="Longest query; the model's positions by default.")] = None,
    batch_size: Annotated[int, typer.Option(help="Queries in a forward pass, of any requests.")] = 32,
    wait_ms: Annotated[float, typer.Option(help="How long a batch waits for more queries.")] = 5.0,
    timeout_s: Annotated[float, typer.Option(help="Longest request.")] = 180.0,
    normalize: Annotated[bool, typer.Option("--normalize", help="(score - mean) / std, of held-out scores.")] = False,
    aggregate: Annotated[
        Literal["min", "mean", "last", "product"], typer.Option(help="How the steps' probabilities become a reward.")
    ] = "min",
) -> None:
    """Serve a reward model over HTTP, in the protocol of OpenRLHF's remote reward clients, until Ctrl-C."""
    # Imported here: no other command needs torch and a server.
    from rlhf_core.rollout import reward_server
    from rlhf_core.rollout.http_client import secret
    from rlhf_core.rollout.reward_models import default_device, load_reward_model

    with one_line_errors():
        token = None if no_token else secret("--token-env", token_env)
        reward_server.check_access(host, token)
        limits = reward_server.Limits(batch_size=batch_size, window_s=wait_ms / 1000, timeout_s=timeout_s)
        with reward_server.bind(host, port) as listening:
            loaded = load_reward_model(
                model,
                device=device or default_device(),
                dtype=dtype,
                max_tokens=max_tokens,
                normalize=normalize,
                aggregate=aggregate,
            )
            address, bound = listening.getsockname()[:2]
            console.print(f"{loaded.kind} model {model}: http://{address}:{bound}/get_reward", soft_wrap=True)
            reward_server.serve(reward_server.make_app(loaded, token=token, limits=limits), listening)


@app.command()
def doctor(
    pipeline: Annotated[Path | None, typer.Argument(help="A pipeline file, whose store and scratch are meant.")] = None,
) -> None:
    """Say whether this machine and what it talks to are fit for a run. Exit code 1 if something is not."""
    with one_line_errors():
        values = read_pipeline(pipeline).get("run") if pipeline is not None else None
        settings = parse_settings(RunSettings, values or {}, "run")
    failed = False
    for check in examine(settings, Path.cwd()):
        typer.echo(str(check))
        failed = failed or check.state == "failed"
    raise typer.Exit(int(failed))


@app.command()
def import_flags(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SCRIPT | -- COMMAND ...]", help="A shell script, else standard input; or the words."),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", help="New file; standard output by default.")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts of train_ppo_ray's data: how many steps.")] = None,
) -> None:
    """An OpenRLHF training command as a pipeline file, with a note on every flag that has no counterpart."""
    with one_line_errors():
        imported = import_command(from_arguments(words or []), prompts)
        for note in imported.notes:
            typer.echo(f"note: {note}", err=True)
        if out is None:
            typer.echo(imported.yaml(), nl=False)
        else:
            with out.open("x", encoding="utf-8") as file:
                file.write(imported.yaml())


def _run_and_report(running: Services, pipeline: Path, overrides: list[str]) -> None:
    """Raises RunFailed unless the run completes."""
    settings = load_pipeline(pipeline, overrides)
    planned = plan_pipeline(settings)
    store = Store(settings.run.store)
    store.check_writable()
    published = _published(planned, store)
    nodes = {node: follow.NodeView(1.0, "reused") if made else follow.NodeView() for node, made in published.items()}
    with Api(running.api_url) as api:
        run_id = _create_run(api, running, pipeline, overrides)
        url = f"{running.ui}/runs/flow-run/{run_id}"
        console.print(f"run: {url}")
        ended = follow.follow(api, follow.RunView(run_id, nodes), console, lambda: _dead_service(running))
        if ended["state_type"] != "COMPLETED":
            raise RunFailed(f"{ended['state_name']}: {ended['state']['message']}")
    console.print(Markdown(store.read_bytes(f"reports/{run_id}/report.md").decode()))
    console.print(f"{ended['state']['message']}; report and plots: {store.url}/reports/{run_id}")


def _create_run(api: Api, running: Services, pipeline: Path, overrides: list[str]) -> str:
    path = f"/deployments/name/sft-rm-ppo/{pipeline.stem}"
    try:
        deployment = api.get(path)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != 404:
            raise
        services.register_pipeline(Path.cwd(), running, pipeline)
        deployment = api.get(path)
    body = {"parameters": run_parameters(pipeline, overrides), "state": {"type": "SCHEDULED"}}
    return api.post(f"/deployments/{deployment['id']}/create_flow_run", body)["id"]


def run_parameters(pipeline: Path, overrides: list[str]) -> dict[str, Any]:
    """The flow's parameters, every one: Prefect takes what is left out from the registered file of the same name."""
    absent = dict.fromkeys(SECTION_DATA) | {"run": {}}
    return absent | read_pipeline(pipeline) | {"set": overrides}


def _published(planned: list[PlannedStage], store: Store) -> dict[str, bool]:
    return {p.node: read_manifest(store, p.stage.name, p.key.key) is not None for p in planned}


def _dead_service(running: Services) -> str | None:
    dead = sorted(set(running.processes) - set(running.living()))
    return f"{dead[0]} has ended; see .rlhf/logs/{dead[0]}.log, then `rlhf up` and retry the run" if dead else None


for command in (verify, gc, lineage):
    app.command()(command)
