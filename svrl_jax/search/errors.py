"""What a search tool raises when it does not answer, and what ends the run."""

# Kinds of failure. An empty result is none: it is a list without items.
FAILURES = (
    "rate_limited",  # asked to wait longer than the call may take
    "quota",  # searches, tokens or money of the account are used up
    "auth",  # the key is not accepted
    "timeout",  # no whole answer within the call's time
    "unreachable",  # no connection, a broken one, or the server's own error
    "bad_response",  # an answer that is not what the interface promises
    "blocked",  # an address we refuse, or a page that shows a captcha or a refusal
    "no_address",  # a picture without a public address, where the provider needs one
    "not_recorded",  # the record alone may answer, and does not hold the call
)
# No later call can do better: the run stops.
PERMANENT = ("quota", "auth")
# The same call may be answered a little later.
PASSING = ("rate_limited", "timeout", "unreachable")


class ToolError(Exception):
    """The tool did not answer. An empty result is no error.

    Attributes:
      kind: one of FAILURES.
    """

    def __init__(self, message: str = "", kind: str = "unreachable"):
        if kind not in FAILURES:
            raise ValueError(f"failure kind {kind!r} is not one of {FAILURES}")
        super().__init__(message or kind)
        self.kind = kind


class SearchStopped(RuntimeError):
    """The run cannot go on searching (dead key, spent budget); the message says why."""


class SearchSetupError(RuntimeError):
    """Search tools that cannot be set up (no key, no package, no index); names the remedy."""
