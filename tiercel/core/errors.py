"""Errors that a user can mend. Everything else is a fault of ours and is raised as it is."""


class TiercelError(Exception):
    """Base of the errors that Tiercel raises on purpose."""


class UserError(TiercelError):
    """A wrong input: one line that names what, where, and what to do. The command line exits with code 2."""
