"""`kvrsim clusters`: the clusters that ship, and what is in one."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrsim.cli.answers import AnswerOptions
from kvrsim.cli.options import Json, takes
from kvrsim.cli.outputs import print_json

app = typer.Typer()


@app.command("list")
@takes(AnswerOptions)
def list_clusters(answers: AnswerOptions) -> None:
    """List the built-in clusters.

    Example: kvrsim clusters list
    """
    answers.check()
    from kvrsim.hardware import builtin_clusters, load_cluster
    from kvrsim.io.schema import to_json

    clusters = {name: load_cluster(name) for name in builtin_clusters()}
    if not answers.printed(
        lambda: {"clusters": [to_json(cluster) for cluster in clusters.values()]},
        "clusters",
        without=("source", "memory_source"),
    ):
        from kvrsim.cli.render.catalogue import show_clusters

        show_clusters(clusters)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A built-in cluster or a file.")],
    json: Json = False,
) -> None:
    """Print one cluster: GPU, links and topology.

    Example: kvrsim clusters show h100-nvlink
    """
    from kvrsim.hardware import load_cluster
    from kvrsim.io.schema import to_json

    cluster = load_cluster(name, argument="NAME|PATH")
    if json:
        print_json(to_json(cluster))
        return
    from kvrsim.cli.render.layout import show_tree

    show_tree(cluster.name, to_json(cluster))
