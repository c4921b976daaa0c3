"""A weight update as both of its sides see it: fingerprints, the manifest, packed changes, and time limits."""
