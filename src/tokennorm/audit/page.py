"""placeholder"""


def page(report):
    """Nothing yet."""
    return ""
