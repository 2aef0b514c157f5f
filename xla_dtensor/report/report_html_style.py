"""The style sheet of the HTML report, for light and for dark screens, and for paper."""

__all__ = ["STYLE"]

STYLE = """
:root{--paper:#fff;--card:#f7f7f5;--ink:#1a1a1a;--quiet:#5c6370;--line:#d8d8d4;--free:#eceae4;
--good:#0a7d38;--bad:#c5221f;--warn:#8f5a00;--note:#0b63a5;--binding:#333a45;--muted-bar:#9aa3ad;
--good-bg:#e8f6ec;--bad-bg:#fdeceb;--warn-bg:#fff5e0;--note-bg:#eaf3fb;--tile:#eef2f6;
--first:#3b82c4;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--paper:#0d1117;--card:#161b22;--ink:#e6edf3;
--quiet:#9aa5b1;--line:#30363d;--free:#21262d;--good:#56d364;--bad:#ff7b72;--warn:#e3b341;
--note:#79c0ff;--binding:#e6edf3;--muted-bar:#6e7681;--good-bg:#10301b;--bad-bg:#3a1614;
--warn-bg:#33270a;--note-bg:#0c2338;--tile:#21262d;--first:#4f9be0}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1060px;margin:0 auto;padding:24px 24px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:19px;margin:40px 0 2px}
h3{font-size:15px;margin:20px 0 4px}
p{margin:4px 0 12px;max-width:78ch}
.quiet{color:var(--quiet)}
.code,code,pre,td{font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:12px;
margin:18px 0 4px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.card b{display:block;font-size:22px;line-height:1.25;margin:2px 0;overflow-wrap:anywhere}
.card span{display:block;color:var(--quiet);font-size:13px}
.card.good{background:var(--good-bg);border-color:var(--good)}.card.good b{color:var(--good)}
.card.bad{background:var(--bad-bg);border-color:var(--bad)}.card.bad b{color:var(--bad)}
.card.unknown{background:var(--warn-bg);border-color:var(--warn)}.card.unknown b{color:var(--warn)}
.badge{display:inline-block;border:1px dashed var(--quiet);border-radius:99px;padding:0 8px;
font-size:12px;font-weight:400;color:var(--quiet);vertical-align:middle}
.finding{border-left:5px solid var(--note);background:var(--note-bg);border-radius:0 8px 8px 0;
padding:8px 14px;margin:8px 0;overflow-wrap:anywhere}
.finding.error{border-color:var(--bad);background:var(--bad-bg)}
.finding.warning{border-color:var(--warn);background:var(--warn-bg)}
.finding.none{border-color:var(--good);background:var(--good-bg)}
.finding p{margin:2px 0}
.finding .severity{font-weight:700;text-transform:uppercase;font-size:12px;letter-spacing:.04em}
.finding.error .severity{color:var(--bad)}.finding.warning .severity{color:var(--warn)}
.finding.note .severity{color:var(--note)}
.chart{width:100%;height:auto;display:block;margin:6px 0}
.chart text{font-size:13px;fill:var(--ink)}
.chart .part{stroke:var(--paper);stroke-width:1}
.chart .on-colour{fill:#fff;font-weight:600;paint-order:stroke;stroke:rgba(0,0,0,.55);
stroke-width:2.5px}
.chart .free{fill:var(--free)}.chart .free-text{fill:var(--quiet)}
.chart .limit{stroke:var(--bad);stroke-width:2;stroke-dasharray:5 3}
.chart .limit-text{fill:var(--bad);font-weight:600}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 20px;margin:6px 0 10px;padding:0;
font-size:13px;color:var(--quiet)}
.legend b,.legend .name{color:var(--ink)}
.swatch{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;
vertical-align:-1px}
.bars{margin:8px 0}
.row{display:grid;grid-template-columns:250px 1fr 130px;gap:14px;align-items:center;margin:7px 0}
.row .what b{display:block;overflow-wrap:anywhere}
.row .what span{display:block;font-size:12px;line-height:1.3}
.row .bar{width:100%;height:20px;background:var(--free);border-radius:3px}
.row.dcn .bar{outline:2px solid var(--bad);outline-offset:1px}
.row.modelled .bar{outline:1px dashed var(--quiet);outline-offset:1px}
.row .value{font-weight:600;white-space:nowrap}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(290px,1fr));gap:16px;
margin:10px 0}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:10px 12px}
figcaption span,figcaption b{display:block;font-size:13px;overflow-wrap:anywhere}
.sharding{width:100%;height:auto;display:block}
.sharding text{font-size:9.5px;fill:var(--quiet)}
.sharding .dim{font-size:11px;fill:var(--ink)}
.sharding .tile{fill:var(--tile);stroke:var(--quiet);stroke-width:.7}
.sharding .first{fill:var(--first)}
.sharding .gap{fill:none;stroke:none}
.sharding .sheet{fill:var(--card);stroke:var(--quiet);stroke-width:.7}
.scroll{overflow-x:auto;margin:6px 0 12px}
table{border-collapse:collapse;font-size:13px}
th{text-align:left;font-weight:600;color:var(--quiet);border-bottom:1px solid var(--line);
padding:4px 14px 4px 0;white-space:nowrap}
td{padding:3px 14px 3px 0;border-bottom:1px solid var(--line);vertical-align:top;font-size:12px;
overflow-wrap:break-word;max-width:420px}
td.number,th.number{text-align:right;white-space:nowrap}
details{margin:8px 0}
summary{cursor:pointer;color:var(--note)}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px;
overflow-x:auto;font-size:13px;white-space:pre-wrap;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;font-size:14px}
dt{font-weight:600}dd{margin:0;color:var(--quiet)}
@media (max-width:700px){.row{grid-template-columns:1fr}.row .value{justify-self:start}
dl{grid-template-columns:1fr}}
@media print{main{max-width:none}.card,figure,.finding{break-inside:avoid}}
"""
"""Plain CSS; it names no font, picture or style from outside."""
