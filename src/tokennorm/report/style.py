"""The style of the page: every colour is a variable, with a value for light and one for dark."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["STYLE"]

_LIGHT = ("#0b6bcb", "#c4501b", "#1a7f4e", "#7c3aed", "#a17600", "#c2185b", "#00808c", "#6d4c41")
_DARK = ("#6cb2ff", "#ff9a62", "#58c994", "#b79bff", "#e2b93b", "#ff7eb0", "#4cc9d6", "#c9a491")


def _colours(values: Sequence[str]) -> str:
    return " ".join(f"--c{index}: {value};" for index, value in enumerate(values))


STYLE = f"""
:root {{ color-scheme: light dark; --text: #222; --faint: #666; --line: #d9d9d9; --page: #fff; --mark: #fff3d6;
  --bad: #c0392b; {_colours(_LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --text: #e4e4e4; --faint: #a0a0a0; --line: #3a3a3a;
  --page: #161616; --mark: #3d3313; --bad: #ff7b6b; {_colours(_DARK)} }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 1240px;
  margin: 2em auto; padding: 0 1em; }}
h1 {{ font-size: 1.35em; margin-bottom: .2em; }} h2 {{ font-size: 1.1em; margin: 2em 0 .6em; }}
h3 {{ font-size: 1em; margin: 0; }} h3 small {{ color: var(--faint); font-weight: 400; }}
.panels {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr));
  gap: 1.6em 2em; }}
svg {{ width: 100%; height: auto; display: block; }}
svg text {{ font: 12px system-ui, sans-serif; fill: var(--faint); }}
.grid {{ stroke: var(--line); stroke-width: .7; }} .axis {{ stroke: var(--faint); }}
.line {{ fill: none; stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round; }}
.line.dashed {{ stroke-dasharray: 5 3; }} .band {{ fill: var(--c); fill-opacity: .16; }}
circle {{ fill: var(--c); }}
.missing {{ fill: var(--bad); }} .bad {{ color: var(--bad); }}
.legend {{ list-style: none; margin: .2em 0 0; padding: 0; font-size: 13px; display: flex; flex-wrap: wrap;
  gap: 0 1.2em; }}
.key {{ display: inline-block; width: 1.1em; height: 0; border-top: 3px solid var(--c); margin-right: .4em;
  vertical-align: middle; }}
.key.dashed {{ border-top-style: dashed; }}
.key.dots {{ width: .6em; height: .6em; border: 0; border-radius: 50%; background: var(--c); }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-size: 13px; }}
td, th {{ padding: 3px 14px 3px 0; text-align: left; vertical-align: top; font-weight: 400;
  overflow-wrap: anywhere; max-width: 46em; }}
thead th {{ font-weight: 600; }} th[scope=row] {{ color: var(--faint); white-space: nowrap; }}
tr.differs td {{ background: var(--mark); padding-left: 6px; }}
summary {{ cursor: pointer; color: var(--faint); }}
footer {{ color: var(--faint); margin-top: 2em; font-size: 13px; }}
{" ".join(f".c{index} {{ --c: var(--c{index}); }}" for index in range(len(_LIGHT)))}
"""
