"""Drawing tokens on a GPU: settings and edits by table row, cuts without sorting, draws in two passes."""
