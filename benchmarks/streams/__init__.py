"""The buses and the codec: NAMEs bus and kafka."""
