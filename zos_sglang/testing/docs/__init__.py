"""Documentation that can be checked: pictures that say what they show, numbers with a source."""
