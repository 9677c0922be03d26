"""Plans for people: one as a command line that can be pasted, two as the fields in which they differ."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.labels import counted
from orchestrator.places import Container
from orchestrator.plan import MASK, ServePlan
from orchestrator.records import to_jsonable

MISSING = "(not here)"


def as_text(plan: ServePlan) -> str:
    """What is served and where, and the command line that starts it. The values of secrets are in neither."""
    facts = [
        ("variant", f"{plan.variant} on box {plan.box}, engine {plan.engine}"),
        ("checkpoint", f"{plan.checkpoint.path} {plan.checkpoint.recipe_id or MISSING}"),
    ]
    if plan.drafter:
        facts.append(("drafter", f"{plan.drafter.path} {plan.drafter.recipe_id or MISSING}"))
    if plan.container:
        facts.append(("image", f"{plan.image} {plan.container.image_id or MISSING}"))
    facts += [
        ("cache", plan.cache_dir),
        ("plugin", f"{plan.plugin.version} {plan.plugin.sha256[:16]}"),
        ("stack", plan.stack.fingerprint),
        ("fingerprint", plan.fingerprint),
    ]
    facts += [("secret", f"{name}={MASK} (from your environment)") for name in plan.secrets]
    lines = [f"{name:<12} {value}" for name, value in facts]
    return "\n".join([*lines, "", *_continued(_command(plan))])


def differences(a: ServePlan, b: ServePlan) -> dict[str, tuple[str | None, str | None]]:
    """Field -> its value in each plan, for the fields that differ; None where a plan has no such field."""
    left, right = fields(to_jsonable(a)), fields(to_jsonable(b))
    return {
        name: (left.get(name), right.get(name))
        for name in [*left, *(name for name in right if name not in left)]
        if left.get(name) != right.get(name)
    }


def differences_as_text(a: ServePlan, b: ServePlan, names: Sequence[str]) -> str:
    """Each differing field on three lines; `names` say which plan is which."""
    found = differences(a, b)
    if not found:
        return f"{names[0]} and {names[1]} are the same server"
    width = max(map(len, names))
    shown = {field: values for field, values in found.items() if not follows(values, (a.cache_dir, b.cache_dir))}
    if list(shown) == ["fingerprint"]:
        return (
            f"{names[0]} and {names[1]} declare different things that make the same server: it has these values anyway"
        )
    lines = [f"{names[0]} and {names[1]} differ in {counted(len(shown), 'field')}"]
    for field, values in shown.items():
        lines += ["", field]
        lines += [f"  {name:<{width}}  {'-' if v is None else v}" for name, v in zip(names, values, strict=True)]
    if len(shown) < len(found):
        rest = ", ".join(field for field in found if field not in shown)
        lines += ["", f"and, as each has a compile cache of its own, in {rest}"]
    return "\n".join(lines)


def follows(values: Sequence[str | None], caches: Sequence[str]) -> bool:
    """Whether the values of a field are one, but for each plan's own compile cache in it: it says nothing new."""
    found = {None if v is None else v.replace(cache, "") for v, cache in zip(values, caches, strict=True)}
    return len(found) == 1 and None not in found


def differences_as_json(a: ServePlan, b: ServePlan, names: Sequence[str]) -> str:
    """{"plans": [name, name], "fields": {field: [value in the first, value in the second]}}."""
    return json.dumps({"plans": list(names), "fields": differences(a, b)}, indent=2)


def _command(plan: ServePlan) -> list[str]:
    """The lines of the command, as words of a shell."""
    if plan.container is None:
        secrets = [f'{name}="${name}"' for name in plan.secrets]
        return ["env -i", *secrets, *(f"{k}={shlex.quote(v)}" for k, v in plan.env.items()), shlex.join(plan.argv)]
    home = shlex.quote(f"{plan.cache_dir}/home")  # an engine would make it too, but as root
    return [
        f"mkdir -p {home} && {plan.engine} run --rm" + (" --init" if plan.engine == "docker" else ""),
        *_options(plan.container, plan),
        *(f"--env {name}" for name in plan.secrets),  # without a value: the engine takes the shell's
        *(f"--env {shlex.quote(f'{name}={value}')}" for name, value in plan.env.items()),
        f"--entrypoint {shlex.quote(plan.argv[0])}",
        plan.container.image_id or plan.image,
        shlex.join(plan.argv[1:]),
    ]


def _options(container: Container, plan: ServePlan) -> list[str]:
    options = [
        *(
            "--mount "
            + shlex.quote(f"type=bind,{_field('source=' + m.source)},target={m.target}")
            + ",readonly" * m.read_only
            for m in container.mounts
        ),
        *(f"--device {shlex.quote(device)}" for device in container.devices),
        *(f"--group-add {group}" for group in container.groups),
        f"--ipc {container.ipc}",
        f"--network {container.network}",
        *(f"--ulimit {name}={value}" for name, value in container.ulimits.items()),
        *(f"--cap-add {name}" for name in container.cap_add),
        *(f"--security-opt {shlex.quote(option)}" for option in container.security_opt),
    ]
    if plan.engine == "docker":  # podman's root is the user already
        options.append('--user "$(id -u):$(id -g)"')
    if container.network == "bridge":
        options.append(f"--publish {plan.host}:{plan.port}:{plan.port}")
    if container.ipc != "host":
        options.append(f"--shm-size {container.shm_size_mib}m")
    if container.memory_gib is not None:
        options.append(f"--memory {container.memory_gib:g}g --memory-swap {container.memory_gib:g}g")  # none of it swap
    return options


def _field(text: str) -> str:
    """As a field of CSV, which the value of --mount is."""
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text


def _continued(lines: Sequence[str]) -> list[str]:
    first, *rest = lines
    words = [first, *(f"  {line}" for line in rest)]
    return [f"{line} \\" for line in words[:-1]] + words[-1:]


def fields(plan: Mapping[str, Any]) -> dict[str, str]:
    """A plan's record as flat text: argv by flag, mounts by target; what was declared shows in the rest."""
    data = {name: value for name, value in plan.items() if name != "declared"}
    data["argv"] = _by_flag(plan["argv"])
    if plan.get("container"):
        mounts = {
            m["target"]: m["source"] + (" (read-only)" if m["read_only"] else "") for m in plan["container"]["mounts"]
        }
        data["container"] = {**plan["container"], "mounts": mounts}
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{prefix} {key}" if prefix else str(key), inner)
        elif value is not None:
            flat[prefix] = value if isinstance(value, str) else json.dumps(value)

    walk("", data)
    return flat


def _by_flag(argv: Sequence[str]) -> dict[str, str]:
    """{"--flag": its values}; the words before the first flag under "program"."""
    found: dict[str, list[str]] = {"program": []}
    current = "program"
    for word in argv:
        if word.startswith("--"):
            current = word
            found[current] = []
        else:
            found[current].append(word)
    return {flag: " ".join(values) for flag, values in found.items()}
