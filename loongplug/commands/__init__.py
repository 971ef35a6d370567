"""What ``loongplug`` has of sub-commands with sub-commands of their own, and shared options."""
