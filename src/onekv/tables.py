"""Tables as aligned columns of text."""


def table(rows: list[list[str]], header: list[str]) -> str:
    """Columns as wide as their widest cell; the first is aligned left, the others right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [header, ["-" * width for width in widths], *rows]
    )
