"""The recipes that come with the package."""
