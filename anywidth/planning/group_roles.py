"""The part that each group of channels has in a network with residuals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from anywidth.errors import AnywidthError
from anywidth.planning.parts import ChannelGroup

# What `Plan.only` takes.
ROLES = ("mlp", "heads", "hidden")


def with_roles(
    groups: Mapping[str, ChannelGroup], order: Sequence[str], attended: Collection[str]
) -> dict[str, ChannelGroup]:
    """The groups with their roles, which follow from what makes and reads them, not from names.

    Args:
        groups: the groups by name.
        order: convolution and linear layers as they first run.
        attended: names of groups that products of two activations have: heads.

    Without attention there are no roles: a gate that is computed from the channels it scales, as in
    many convolutional networks, looks like a residual here.
    """
    # What no layer reads, such as CLIP's embeddings of texts and images, is compared, not attended.
    heads = {name for name in attended if name in groups and groups[name].readers}
    if not heads:
        return dict(groups)
    # Heads that all blocks share, as with T5's positions, are computed from heads before them; they
    # are the residual too only if a layer leads from one to the other directly.
    hidden = {
        name
        for name in _residual(groups, order)
        if name not in heads or set(groups[name].makers) & set(groups[name].readers)
    }
    mlp = _inside_branches(groups, hidden, set(groups) - hidden - heads)
    held = {"mlp": mlp, "heads": heads, "hidden": hidden}
    return {
        name: replace(group, roles=tuple(role for role in ROLES if name in held[role]))
        for name, group in groups.items()
    }


def _residual(groups: Mapping[str, ChannelGroup], order: Sequence[str]) -> set[str]:
    """Groups to which a layer adds what was computed from them before."""
    sources: dict[str, set[str]] = {name: set() for name in groups}
    read, made = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for name, group in groups.items():
        for layer in group.readers:
            read[layer].append(name)
        for layer in group.makers:
            made[layer].append(name)
    found: set[str] = set()
    for layer in order:
        before = set(read[layer]).union(*(sources[name] for name in read[layer]))
        for name in made[layer]:
            if name in before:
                found.add(name)
            sources[name] |= before
    return found


def _inside_branches(
    groups: Mapping[str, ChannelGroup], hidden: set[str], candidates: set[str]
) -> set[str]:
    """Those candidates that are computed from the residual, and only for the residual."""
    found = {name for name in candidates if groups[name].makers and groups[name].readers}
    while True:
        inside = hidden | found
        made_from = {layer for name in inside for layer in groups[name].readers}
        made_for = {layer for name in inside for layer in groups[name].makers}
        kept = {
            name
            for name in found
            if made_from.issuperset(groups[name].makers)
            and made_for.issuperset(groups[name].readers)
        }
        if kept == found:
            return found
        found = kept


def groups_with_roles(groups: Mapping[str, ChannelGroup], roles: Sequence[str]) -> set[str]:
    """The names of the groups all of whose roles are asked for, if some of each can narrow."""
    if not roles or not set(roles) <= set(ROLES):
        raise AnywidthError(f"only{roles}: expected one or more of {ROLES}")
    kept = {name for name, g in groups.items() if g.roles and set(g.roles) <= set(roles)}
    for name in kept:
        tied = groups[name].tied
        if tied is not None and tied[0] not in kept:
            raise AnywidthError(
                f"only{roles}: group {name!r} is tied to {tied[0]!r}, which would stay whole; name "
                "the role of that one too, or leave out the tie"
            )
    for role in roles:
        if not any(role in groups[name].roles and groups[name].fixed is None for name in kept):
            raise AnywidthError(f"only{roles}: {_why_none(groups, role)}")
    return kept


def _why_none(groups: Mapping[str, ChannelGroup], role: str) -> str:
    """Why no group with this role narrows by itself, and what to ask for instead."""
    having = [group for group in groups.values() if role in group.roles]
    if not having:
        return f"no channels of this network have the role {role!r}; print(plan) shows all roles"
    both = next((group for group in having if group.fixed is None), None)
    if both is None:
        return f"the channels with the role {role!r} cannot narrow: {having[0].fixed}"
    names = ", ".join(f'"{name}"' for name in both.roles)
    return f"{both.name!r} has the roles {names}, which narrow together: call only({names})"
