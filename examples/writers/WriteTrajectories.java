// Appends trajectories to Kafka without any code of Rollstream (docs/reference/wire-format.md): for the first GROUPS
// groups that dispatch admits, one of each name, with tokens and log-probabilities of this program's own "model".
//   java -cp 'JARS/*' examples/writers/WriteTrajectories.java 127.0.0.1:9092 runs GROUPS
// JARS: kafka-clients, jackson-databind and hash4j (for XXH3) with what they need.
import com.dynatrace.hash4j.hashing.Hashing;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.zip.CRC32;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class WriteTrajectories {
    static final ObjectMapper JSON = new ObjectMapper();
    static final int[] ANSWER = {5, 9, 2, 7};

    public static void main(String[] arguments) throws Exception {
        String server = arguments[0], prefix = arguments[1];
        int left = Integer.parseInt(arguments[2]);
        var reader = new ByteArrayDeserializer();
        var writer = new ByteArraySerializer();
        try (var admissions = new KafkaConsumer<byte[], byte[]>(Map.of("bootstrap.servers", server), reader, reader);
             var prompts = new KafkaConsumer<byte[], byte[]>(Map.of("bootstrap.servers", server), reader, reader);
             var producer = new KafkaProducer<byte[], byte[]>(
                 Map.of("bootstrap.servers", server, "acks", "all", "enable.idempotence", true), writer, writer)) {
            var topic = prefix + ".trajectories";
            int partitions = producer.partitionsFor(topic).size();
            var admitted = new TopicPartition(prefix + ".admissions", 0);
            admissions.assign(List.of(admitted));
            admissions.seekToBeginning(List.of(admitted));
            while (left > 0)
                for (var message : admissions.poll(Duration.ofSeconds(1))) {
                    JsonNode record = header(message.value()).get("record");
                    if (left == 0 || !record.get("schema").asText().equals("admitted/1")) continue; // the role's `opened/1`
                    byte[] key = record.get("group").asText().getBytes(StandardCharsets.UTF_8);
                    var crc = new CRC32();
                    crc.update(key);
                    int partition = (int) (crc.getValue() % partitions);
                    byte[] prompt = read(prompts, prefix + ".prompts", record.get("prompt"));
                    for (int index = 0; index < record.get("trajectories").size(); index++)
                        producer.send(new ProducerRecord<>(topic, partition, key, trajectory(record, prompt, index))).get();
                    left--;
                }
        }
    }

    static JsonNode header(byte[] value) throws Exception {
        return JSON.readTree(value, 16, ByteBuffer.wrap(value).order(ByteOrder.LITTLE_ENDIAN).getInt(4));
    }

    static byte[] read(KafkaConsumer<byte[], byte[]> consumer, String topic, JsonNode address) {
        var partition = new TopicPartition(topic, address.get("partition").asInt());
        consumer.assign(List.of(partition));
        consumer.seek(partition, address.get("offset").asLong());
        while (true)
            for (var message : consumer.poll(Duration.ofSeconds(1))) return message.value();
    }

    static byte[] trajectory(JsonNode admitted, byte[] prompt, int index) throws Exception {
        JsonNode asked = header(prompt).get("record");
        int length = asked.get("tokens:u4").asInt(); // the first array of a prompt, behind its header
        int begin = 16 + ByteBuffer.wrap(prompt).order(ByteOrder.LITTLE_ENDIAN).getInt(4) + 7 & ~7;
        var version = JSON.createObjectNode().put("number", 0).put("term", 1);
        double now = System.currentTimeMillis() / 1e3;
        ObjectNode record = JSON.createObjectNode().put("schema", "trajectory/1")
            .put("trajectory", admitted.get("trajectories").get(index).asText()).put("group", admitted.get("group").asInt())
            .put("index", index).put("attempt", 1).put("task", asked.get("task").asText())
            .put("rollout", "java").put("rollout_term", 1)
            .put("tokens:u4", length + ANSWER.length).put("sources:u1", length + ANSWER.length)
            .put("logprobs:f4", ANSWER.length);
        record.putArray("spans").addObject().put("start", 0).put("end", ANSWER.length).set("version", version);
        record.put("finish", "length").put("reward", index % 2).put("started_s", now).put("finished_s", now)
            .set("trainer_version", version);
        byte[] text = JSON.writeValueAsBytes(JSON.createObjectNode().set("record", record));
        ByteBuffer data = ByteBuffer.allocate(16 + text.length + 9 * (length + ANSWER.length) + 32).order(ByteOrder.LITTLE_ENDIAN);
        data.put("RSR1".getBytes(StandardCharsets.US_ASCII)).putInt(text.length).putLong(0).put(text);
        align(data);
        for (int i = 0; i < length; i++) data.putInt(ByteBuffer.wrap(prompt).order(ByteOrder.LITTLE_ENDIAN).getInt(begin + 4 * i));
        for (int token : ANSWER) data.putInt((token + index) % 32);
        align(data);
        for (int i = 0; i < length + ANSWER.length; i++) data.put((byte) (i < length ? 0 : 1));
        align(data);
        for (int i = 0; i < ANSWER.length; i++) data.putFloat(-3.4f);
        byte[] value = new byte[data.position()];
        data.flip().get(value);
        long checksum = Hashing.xxh3_64().hashBytesToLong(value, 16, value.length - 16);
        ByteBuffer.wrap(value).order(ByteOrder.LITTLE_ENDIAN).putLong(8, checksum);
        return value;
    }

    static void align(ByteBuffer data) { // every array begins at a multiple of eight
        while (data.position() % 8 != 0) data.put((byte) 0);
    }
}
