"""The tables and the picture of what benchmarks/compare.py measured."""

import matplotlib.pyplot as plt


def table(titles, rows):
    """Return rows of texts as lines; all columns but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = []
    for row in (titles, *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [
            first[0].ljust(first[1]),
            *(text.rjust(width) for text, width in others),
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def rate(values):
    """Return images per second as two texts: the median, and the least and most."""
    return f"{values['median']:,.0f}", f"{values['least']:,.0f}-{values['most']:,.0f}"


def the_limit(result, row):
    """Return the row of `limits` with the work of a stage's row."""
    wanted = [row[name] for name in ("processes", "batch_size", "precision")]
    for limit in result["limits"]:
        if [limit[name] for name in ("processes", "batch_size", "precision")] == wanted:
            return limit
    raise LookupError(f"no limit was measured for {wanted}")


def of_limit(result, row):
    """Return a stage's images/s as a fraction of its limit."""
    return row["images_per_s"]["median"] / the_limit(result, row)["bare"]["median"]


def communication(limit):
    """Return the part of a DDP step's time that is communication, as text."""
    return (
        f"{limit['communication']['median']:.1%}"
        if "communication" in limit
        else "none"
    )


def stages_table(result):
    first = result["stages"][0]
    baseline = first["images_per_s"]["median"]
    device = result["work"]["device"]
    gpus = any(counted["gpu_bytes"] for counted in result["counted"].values())
    titles = ["stage", "processes", "device", "precision", "images/s", "least-most"]
    titles += ["s/epoch", "GPU MiB" if gpus else "MiB", "vs 01", "of limit", "loading"]
    titles += ["evaluation s"]
    rows = []
    for row in result["stages"]:
        counted = result["counted"][row["stage"]]
        memory = counted["gpu_bytes"] if gpus else row["bytes"]["most"]
        cells = [row["stage"], str(row["processes"]), device, row["precision"]]
        cells += [*rate(row["images_per_s"]), f"{row['epoch_s']['median']:.2f}"]
        cells += [f"{memory / 2**20:.0f}"]
        cells += [f"{row['images_per_s']['median'] / baseline:.2f}"]
        cells += [f"{of_limit(result, row):.2f}", f"{row['loading']['median']:.1%}"]
        cells += [f"{row['evaluation_s']['median']:.3f}"]
        rows.append(cells)
    for limit in result["limits"]:
        if limit["batch_size"] == first["batch_size"]:
            cells = ["the limit", str(limit["processes"]), device, limit["precision"]]
            cells += [*rate(limit["bare"]), "", ""]
            cells += [f"{limit['bare']['median'] / baseline:.2f}", "", "", ""]
            rows.append(cells)
    return table(titles, rows)


def scaling_table(result):
    titles = ["processes", "global batch", "images/s", "least-most", "limit"]
    titles += ["of limit", "communication"]
    rows = []
    for row in result["scaling"]:
        limit = the_limit(result, row)
        cells = [str(row["processes"]), str(row["batch_size"])]
        cells += [*rate(row["images_per_s"]), rate(limit["bare"])[0]]
        cells += [f"{of_limit(result, row):.2f}", communication(limit)]
        rows.append(cells)
    return table(titles, rows)


def counted_table(result):
    titles = ["stage", "collectives per step", "bytes per step"]
    rows = []
    for stage, counted in result["counted"].items():
        seen = counted["per_step"]
        calls = ", ".join(f"{seen[name]['calls']:g} {name}" for name in seen)
        size = sum(sums["bytes"] for sums in seen.values())
        rows.append([stage, calls or "none", f"{size:,.0f}"])
    return table(titles, rows)


def evaluation_line(result):
    """Compare the evaluation of stages 06 and 07, if both were measured."""
    seconds = {
        row["stage"][:2]: row["evaluation_s"]["median"] for row in result["stages"]
    }
    if not {"06", "07"} <= seconds.keys():
        return []
    faster = seconds["06"] / seconds["07"]
    return [
        "",
        f"The evaluation of stage 07 is {faster:.2f} times as fast as that of"
        " stage 06.",
    ]


def show(result):
    """Return the tables of a result, as the text that the command prints."""
    machine, work = result["machine"], result["work"]
    device = " and ".join(machine["gpus"]) or f"{machine['cores']} cores"
    windows = int(work["rounds"]) * (int(work["epochs"]) - 1)
    lines = [
        f"{machine['cpu']}, {device}; torch {machine['torch']}",
        f"{work['arch']}, {work['images']} images of {work['image_size']} px, global"
        f" batch {work['batch_size']}; medians of {windows} epochs",
        "",
        *stages_table(result),
        *evaluation_line(result),
    ]
    if result["scaling"]:
        lines += [
            "",
            f"Scaling of {result['scaling'][0]['stage']}:",
            *scaling_table(result),
        ]
    lines += ["", "What a process sends, per optimizer step:", *counted_table(result)]
    return "\n".join(lines)


def medians(result):
    """Return the numbers that the picture shows, as text; it is stored in the file."""
    pairs = [(row["stage"], row["images_per_s"]["median"]) for row in result["stages"]]
    return ", ".join(f"{stage} {median:.0f} images/s" for stage, median in pairs)


def draw(result, path):
    """Draw the images/s of the stages as bars, with their spread, against the limit."""
    rows = result["stages"]
    figure, axis = plt.subplots(figsize=(9, 4))
    middle = [row["images_per_s"]["median"] for row in rows]
    low = [row["images_per_s"]["median"] - row["images_per_s"]["least"] for row in rows]
    high = [row["images_per_s"]["most"] - row["images_per_s"]["median"] for row in rows]
    names = [f"{row['stage'][:2]} {row['stage'][3:].replace('_', ' ')}" for row in rows]
    axis.barh(
        names, middle, xerr=[low, high], color="tab:blue", ecolor="0.3", capsize=3
    )
    for place, row in enumerate(rows):
        limit = the_limit(result, row)["bare"]["median"]
        mark = {"color": "tab:red"}
        if place == 0:
            mark["label"] = "the limit: nothing but the steps"
        axis.plot([limit, limit], [place - 0.4, place + 0.4], **mark)
    axis.invert_yaxis()
    axis.set(
        xlabel="images/s in training (bars: median, lines: from least to most)",
        xlim=(0, None),
    )
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    stored = {"Software": None, "Description": medians(result)}
    figure.savefig(
        path, dpi=110, bbox_inches="tight", facecolor="white", metadata=stored
    )
