"""Agents that look: policies that read images beside text."""
