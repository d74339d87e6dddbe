"""Pictures and video, from files to what the vision tower reads. Needs the ``vision`` extra."""
