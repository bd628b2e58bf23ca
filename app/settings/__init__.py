"""Settings of a node: flags over environment (KVFERRY_) over file over defaults.

Parsed once into frozen objects. An unknown key or an invalid combination stops the start and names the
key. Nested keys are written `transfer.group_layers` in the file's table [transfer], as
KVFERRY_TRANSFER__GROUP_LAYERS in the environment and as --transfer.group-layers on the command line.
"""

from app.settings.load import load_settings
from app.settings.node import NodeSettings

__all__ = ["NodeSettings", "load_settings"]
