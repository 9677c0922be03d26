"""The one exception this package raises for a person to read."""


class PluginError(ValueError):
    """Wrong input: a knob, a checkpoint, a path. The message is one line and names the culprit."""
