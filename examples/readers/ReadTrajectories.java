// Reads trajectories from Kafka without any code of Rollstream (docs/reference/wire-format.md): one JSON line each.
//   java -cp 'JARS/*' examples/readers/ReadTrajectories.java 127.0.0.1:9092 runs.trajectories
// JARS: kafka-clients, jackson-databind and hash4j (for XXH3) with what they need.
import com.dynatrace.hash4j.hashing.Hashing;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Map;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

public class ReadTrajectories {
    static final ObjectMapper JSON = new ObjectMapper();

    public static void main(String[] arguments) throws Exception {
        var bytes = new ByteArrayDeserializer();
        Map<String, Object> settings = Map.of("bootstrap.servers", arguments[0]);
        try (var consumer = new KafkaConsumer<byte[], byte[]>(settings, bytes, bytes)) {
            var partitions = consumer.partitionsFor(arguments[1]).stream()
                .map(p -> new TopicPartition(p.topic(), p.partition())).toList();
            consumer.assign(partitions);
            consumer.seekToBeginning(partitions);
            var ends = consumer.endOffsets(partitions);
            while (partitions.stream().anyMatch(p -> consumer.position(p) < ends.get(p)))
                for (var message : consumer.poll(Duration.ofSeconds(1)))
                    System.out.println(decode(message.value()));
        }
    }

    static ObjectNode decode(byte[] value) throws Exception {
        ByteBuffer data = ByteBuffer.wrap(value).order(ByteOrder.LITTLE_ENDIAN);
        byte[] magic = new byte[4];
        data.get(magic);
        if (!new String(magic, StandardCharsets.US_ASCII).equals("RSR1"))
            throw new IllegalArgumentException("not a Rollstream record");
        int headerBytes = data.getInt();
        long checksum = data.getLong();
        if (Hashing.xxh3_64().hashBytesToLong(value, 16, value.length - 16) != checksum)
            throw new IllegalArgumentException("checksum differs");
        JsonNode record = JSON.readTree(value, 16, headerBytes).get("record");
        ObjectNode whole = JSON.createObjectNode();
        int at = 16 + headerBytes;
        for (var fields = record.fields(); fields.hasNext(); ) {
            var field = fields.next();
            String[] key = field.getKey().split(":"); // an array is named name:kind and item bytes
            if (key.length == 1) { whole.set(key[0], field.getValue()); continue; }
            at = (at + 7) & ~7; // every array begins at a multiple of eight
            var items = whole.putArray(key[0]);
            for (int i = 0; i < field.getValue().asInt(); i++, at += key[1].charAt(1) - '0')
                switch (key[1]) {
                    case "u4" -> items.add(Integer.toUnsignedLong(data.getInt(at)));
                    case "u1" -> items.add(Byte.toUnsignedInt(data.get(at)));
                    case "f4" -> items.add(data.getFloat(at));
                    default -> throw new IllegalArgumentException("unknown array " + field.getKey());
                }
        }
        return whole;
    }
}
