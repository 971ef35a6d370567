"""The groups of sub-commands of ``loongplug``, and the options that commands share."""
