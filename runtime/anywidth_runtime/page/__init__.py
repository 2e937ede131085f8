"""The page: plain files, no build step."""
