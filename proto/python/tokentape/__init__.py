"""The contract between tokentape's components: generated messages (`tokentape.v1`), how to dial, how to serve."""
