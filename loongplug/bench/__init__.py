"""Measurements that a user can repeat: ``loongplug bench``."""
