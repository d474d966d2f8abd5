"""Commands that keep a store small and safe."""
