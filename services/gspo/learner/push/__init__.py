"""One weight update: from a published version to every generator."""
