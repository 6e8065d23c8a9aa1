"""`kvrsim clusters`: the clusters that ship, and what is in one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrsim.cli.options import Json, print_json

if TYPE_CHECKING:
    from kvrsim.hardware import Cluster

app = typer.Typer(help="Clusters: GPUs and the links between them.")


@app.command("list")
def list_clusters(json: Json = False) -> None:
    """The clusters that ship with kvrsim."""
    from kvrsim.hardware import builtin_clusters, load_cluster

    clusters = {name: load_cluster(name) for name in builtin_clusters()}
    if json:
        print_json({"clusters": [_to_dict(cluster) for cluster in clusters.values()]})
        return
    from kvrsim.cli.tables import show_clusters

    show_clusters(clusters)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A built-in cluster or a file.")],
    json: Json = False,
) -> None:
    """One cluster: its GPU, links and layout, with the datasheets they are from."""
    from kvrsim.hardware import load_cluster

    cluster = load_cluster(name, argument="NAME|PATH")
    if json:
        print_json(_to_dict(cluster))
        return
    from kvrsim.cli.tables import show_tree

    show_tree(cluster.name, _to_dict(cluster))


def _to_dict(cluster: Cluster) -> dict[str, Any]:
    content = asdict(cluster)
    content["gpu"]["peak_flops"] = dict(cluster.gpu.peak_flops)
    return content
