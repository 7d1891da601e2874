"""How everything was measured, and how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from bifolio.lab.report import numbers
from bifolio.lab.report.documents import Documents
from bifolio.lab.report.sections import Section, Table


def section(found: Documents) -> Section:
    """Machines, versions, seeds, commands."""
    tables = [_environment(bench) for bench in found.benches]
    tables += [_evaluation(found.evals)] if found.evals else []
    notes = [
        *found.missing,
        *found.skipped,
        *([f"joined from {', '.join(found.files)}"] if found.files else []),
    ]
    commands = [bench["environment"]["command"] for bench in found.benches]
    commands += [
        shlex.join(e["command"]) for e in found.evals if isinstance(e.get("command"), list)
    ]
    return Section(
        "How it was measured",
        tables=tables,
        notes=notes,
        commands=list(dict.fromkeys(commands)),
    )


def _environment(bench: Mapping[str, Any]) -> Table:
    environment = bench["environment"]
    machine = environment["machine"]
    processor, limits = machine.get("processor", {}), machine.get("limits", {})
    reads, operations = (
        environment[key] for key in ("read_bytes_per_second", "bf16_operations_per_second")
    )
    rows = [
        ["when", environment["created"]],
        ["processor", f"{processor.get('name', '?')}, {limits.get('cores_allowed', '?')} cores"],
        ["memory", numbers.size(limits.get("memory_limit") or limits.get("memory_total"))],
        ["memory reads, measured", f"{numbers.size(reads)}/s" if reads else numbers.NONE],
        [
            "bf16 products, measured",
            f"{operations / 1e9:,.0f} Gop/s" if operations else numbers.NONE,
        ],
        ["load average before", numbers.short(environment["load_average"])],
        ["system", f"{environment['system']}, Python {environment['python']}"],
        ["versions", ", ".join(f"{k} {v}" for k, v in environment["versions"].items())],
        ["commit", environment["commit"] or "not a checkout"],
        ["kernels", ", ".join(sorted({t["kernels"] for t in _told(bench) if t["kernels"]})) or "–"],
        ["seed", str(bench["seed"])],
    ]
    for target, described in bench["targets"].items():
        rows.append(
            [
                f"{target or 'target'}, as it ran",
                described.get("plan") or described.get("url") or "?",
            ]
        )
    return Table(["benchmark", ""], rows, names=2)


def _told(bench: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return list(bench["targets"].values())


def _evaluation(evals: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for document in evals:
        versions = document.get("versions") or {}
        rows.append(
            [
                str(document.get("created", "?")),
                str((document.get("model") or {}).get("name", "?")),
                str((document.get("model") or {}).get("digest", "?"))[:16],
                ", ".join(f"{name} {value}" for name, value in versions.items()),
            ]
        )
    return Table(["evaluation", "model", "digest of weights", "versions"], rows, names=4)
