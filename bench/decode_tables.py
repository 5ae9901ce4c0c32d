# SPDX-License-Identifier: Apache-2.0
"""What decode_peers.py's figures are held against, and tables of them. Used by decode_peers.py, which prints them, and by
tools/benchmarks.py, which writes them into the documents; needs only Python.

A row is one contender at one point: `us`, `tbytes` (TB/s of K and V), `of_reading` (the time of the kernel that only
reads over its own). Contenders are `tessera`, `tessera page 16`, both with ` queue` behind them where decode_queue was
asked for by name, peers, and `read`.
"""
import re

from tables import is_ours, markdown

READ = "read"
# The bars of an H200 in microseconds: heads 32/8, D = 128, one query, a contiguous cache.
MICROSECONDS = {("bf16", 1, 1024): 6.5, ("bf16", 1, 4096): 9.5, ("bf16", 1, 8192): 13, ("bf16", 1, 32768): 35.5,
                ("bf16", 1, 131072): 126, ("bf16", 8, 4096): 35, ("bf16", 16, 8192): 121, ("bf16", 64, 8192): 482,
                ("e4m3", 1, 8192): 9, ("e4m3", 64, 8192): 250}
LARGEST_PAGE_RATIO, LARGEST_PAGE_1_RATIO = 1.03, 1.10  # of a contiguous cache's time
LEAST_PREFILL_SHARE = 0.97  # of a contiguous cache's speed
APPEND_MICROSECONDS, HOST_MICROSECONDS, LATENT_TBYTES = 3, 6, 4.1


def page_of(name):
    """The page size in a contender's name; 0: contiguous."""
    found = re.search(r" page (\d+)", name)
    return int(found[1]) if found else 0


def contiguous(name):
    """The same contender over a contiguous cache."""
    return re.sub(r" page \d+", "", name)


def bar_of(row):
    """Microseconds that a row of ours is held against, or None."""
    if row["part"] == "append":
        return APPEND_MICROSECONDS
    usual = (row["Hq"], row["Hk"], row["D"], row["Nq"]) == (32, 8, 128, 1) and "lengths" not in row
    return MICROSECONDS.get((row["kv"], row["B"], row["keys"])) if usual and row["peer"] == "tessera" else None


def title(row):
    lengths = f"{row['tokens']} keys in all, longest {row['keys']}" if "lengths" in row else f"{row['keys']} keys"
    heads = "MLA " + str(row["Hq"]) if row.get("latent") else f"{row['Hq']}/{row['Hk']} D={row['D']}"
    return (f"B={row['B']} {lengths} {heads}" + (f" Nq={row['Nq']}" if row["Nq"] > 1 else "")
            + ("" if row["kv"] == "bf16" else f" {row['kv']}"))


def points(rows):
    """{(part, title): {contender: row}} of rows with a figure."""
    found = {}
    for row in rows:
        if row["kind"] == "decode" and "us" in row:
            found.setdefault((row["part"], title(row)), {})[row["peer"]] = row
    return found


def best_peer(point):
    """Microseconds of the fastest peer that computes the same, or None."""
    return min((row["us"] for name, row in point.items() if not is_ours(name) and name != READ), default=None)


def verdict(what, where, value, wanted, met):
    return {"kind": "verdict", "what": what, "where": where, "value": round(value, 3), "wanted": wanted, "met": met}


def verdicts(rows):
    """Every bar that the rows can be held against."""
    found = []
    for (part, where), point in points(rows).items():
        ours, peer = {name: row for name, row in point.items() if is_ours(name)}, best_peer(point)
        whole = ours.get("tessera")
        for name, row in ours.items():
            bar, page, base = bar_of(row), page_of(name), ours.get(contiguous(name))
            paged = name.removeprefix("tessera ")
            if bar:
                found.append(verdict("us", where, row["us"], bar, row["us"] <= bar))
            if page and base and part == "prefill":
                share = base["us"] / row["us"]
                found.append(verdict(f"{paged}, speed over contiguous", where, share, LEAST_PREFILL_SHARE,
                                     share >= LEAST_PREFILL_SHARE))
            elif page and base:
                ratio, most = row["us"] / base["us"], LARGEST_PAGE_1_RATIO if page == 1 else LARGEST_PAGE_RATIO
                found.append(verdict(f"{paged}, time over contiguous", where, ratio, most, ratio <= most))
        if whole and peer and part != "prefill":
            found.append(verdict("best peer's time over ours", where, peer / whole["us"], 1, peer >= whole["us"]))
        if whole and whole.get("latent") and whole["Hq"] == 16:
            found.append(verdict("TB/s", where, whole["tbytes"], LATENT_TBYTES, whole["tbytes"] >= LATENT_TBYTES))
        if whole and "host_us" in whole and part == "bars":
            found.append(verdict("host us of a call, Python's included", where, whole["host_us"], HOST_MICROSECONDS,
                                 whole["host_us"] <= HOST_MICROSECONDS))
    return found


def speed_table(rows, part):
    """Lines of a table of one part: a point each."""
    found = {where: point for (of, where), point in points(rows).items() if of == part}
    names = list(dict.fromkeys(name for point in found.values() for name in point if name != READ))
    lines = []
    for where, point in found.items():
        whole, peer = point.get("tessera"), best_peer(point)
        bar = bar_of(whole) if whole else None
        cells = [f"{point[name]['us']:.1f}" if name in point else "" for name in names]
        read = point.get(READ)
        lines.append([where, *cells, f"{read['us']:.1f}" if read else "",
                      f"{whole['tbytes']:.2f}" if whole and "tbytes" in whole else "",
                      f"{read['us'] / whole['us']:.3f}" if read and whole else "",
                      f"{peer / whole['us']:.3f}" if peer and whole else "",
                      f"{bar:g}" if bar else "", ("yes" if whole["us"] <= bar else "no") if bar else ""])
    return markdown(["problem", *(f"{name} us" for name in names), "reading us", "TB/s", "of reading",
                     "best peer / tessera", "bar us", "met"], lines)


def verdict_table(found):
    """Lines of a table: every bar that was missed, then how many of each kind were met."""
    kinds = {}
    for row in found:
        kinds.setdefault(row["what"], []).append(row["met"])
    return markdown(["what", "met", "of"], [[what, str(sum(met)), str(len(met))] for what, met in kinds.items()]) + [
        "", *(markdown(["missed", "where", "value", "wanted"],
                       [[row["what"], row["where"], f"{row['value']:g}", f"{row['wanted']:g}"]
                        for row in found if not row["met"]]) if any(not row["met"] for row in found)
              else ["Nothing was missed."])]
