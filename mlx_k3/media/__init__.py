"""Pictures and films on their way to the model: opened, sized, and put in their places."""
