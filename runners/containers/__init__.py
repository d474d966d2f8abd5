"""Agents in containers: docker or a compatible program, and Kubernetes."""
