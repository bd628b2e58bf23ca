"""The way down to a node of the tree."""

from __future__ import annotations

from app.core.prefix_tree import NodeInfo, PrefixTree


def nodes_to(tree: PrefixTree, node: int) -> list[NodeInfo]:
    """The nodes down to `node`, from the top; for node 0, which is none, nothing."""
    return [tree.node(number) for number in tree.path(node)] if node else []
