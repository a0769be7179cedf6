"""What a search tool raises when it does not answer."""


class ToolError(Exception):
    """The tool did not answer (unreachable, refused, timed out). An empty result is no error."""
