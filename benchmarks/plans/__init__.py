"""Plans of published models on usual machines, for docs/scale.md."""
