package shop;

import com.google.protobuf.ByteString;
import io.grpc.Channel;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.InsecureServerCredentials;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.SQLException;
import java.util.HexFormat;
import java.util.List;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Supplier;
import java.util.stream.Stream;
import tmc.v1.CheckManyRequest;
import tmc.v1.CheckManyResponse;
import tmc.v1.CheckServiceGrpc;
import tmc.v1.DescribeChecksRequest;
import tmc.v1.MessageServiceGrpc;
import tmc.v1.PrepareRequest;
import tmc.v1.RollbackRequest;
import tmc.v1.SubmitRequest;

/**
 * A shop that sells orders: each one is paid and announced, or neither.
 *
 * <p>Arguments: CENTERS KEY JDBC_URL CHECKS ORDERS, where CHECKS is the host:port at which it answers the center, and CENTERS
 * are the addresses of its servers.
 */
public final class Shop {
    private final Ledger.Connections connections;
    private final Ledger ledger;
    private final Center center;

    private Shop(Ledger.Connections connections, Ledger ledger, Center center) {
        this.connections = connections;
        this.ledger = ledger;
        this.center = center;
    }

    public static void main(String[] arguments) throws Exception {
        String jdbc = arguments[2];
        int orders = Integer.parseInt(arguments[4]);
        Ledger.Connections connections = () -> DriverManager.getConnection(jdbc);
        Ledger ledger = new Ledger(connections);
        Center center = new Center(arguments[0], arguments[1], arguments[3], ledger);
        Server checks = Checks.serve(arguments[3], ledger, center);
        Runtime.getRuntime().addShutdownHook(new Thread(checks::shutdown));
        Shop shop = new Shop(connections, ledger, center);
        for (String messageId : ledger.unsettled()) { // what an earlier process did not get to
            try {
                shop.submit(messageId);
            } catch (StatusRuntimeException e) {
                System.err.println("look at the ledger row of " + messageId + ": " + e);
            }
        }
        AtomicInteger next = new AtomicInteger();
        ExecutorService sellers = Executors.newFixedThreadPool(8);
        for (int i = 0; i < 8; i++) {
            sellers.execute(() -> {
                for (int number = next.getAndIncrement(); number < orders; number = next.getAndIncrement()) {
                    shop.sellForSure(number);
                }
            });
        }
        sellers.shutdown();
        sellers.awaitTermination(1, TimeUnit.HOURS);
        System.out.println("all is sold");
        checks.awaitTermination();
    }

    private void sellForSure(int number) {
        while (true) {
            try {
                if (!isSold(number)) {
                    sell(number);
                }
                return;
            } catch (SQLException | Ledger.Fenced | StatusRuntimeException e) { // whether it committed or not, the center asks us
                System.err.println("order " + number + " is sold again: " + e);
                Center.pause(20);
            }
        }
    }

    /** The customer of every ninth order changes their mind. */
    private void sell(int number) throws SQLException, Ledger.Fenced {
        PrepareRequest message = PrepareRequest.newBuilder()
                .setTopic("order.paid").setKey(String.valueOf(number)).setContentType("text/plain")
                .setBody(ByteString.copyFromUtf8(String.valueOf(number)))
                .setAttemptId(ByteString.copyFrom(Ledger.randomId())).setLedgerId(ledger.id).build();
        String messageId = center.call(() -> center.stub().prepare(message)).getMessageId();
        try (Connection connection = connections.open()) {
            connection.setAutoCommit(false);
            try (PreparedStatement insert = connection.prepareStatement("INSERT INTO orders VALUES (?)")) {
                insert.setString(1, String.valueOf(number));
                insert.executeUpdate();
                if (number % 9 == 0) {
                    connection.rollback();
                    center.call(() -> center.stub().rollback(RollbackRequest.newBuilder().setMessageId(messageId).build()));
                    return;
                }
                ledger.record(connection, messageId, message);
                connection.commit();
            } catch (SQLException | Ledger.Fenced e) {
                connection.rollback();
                throw e;
            }
        }
        submit(messageId);
    }

    private void submit(String messageId) throws SQLException {
        try {
            center.call(() -> center.stub().submit(SubmitRequest.newBuilder().setMessageId(messageId).build()));
        } catch (StatusRuntimeException e) {
            if (!Center.hasReason(e, "MESSAGE_GONE")) {
                throw e;
            } // else it was delivered, and removed since
        }
        ledger.settle(messageId);
    }

    private boolean isSold(int number) throws SQLException {
        try (Connection connection = connections.open();
                PreparedStatement query = connection.prepareStatement("SELECT 1 FROM orders WHERE name = ?")) {
            query.setString(1, String.valueOf(number));
            return query.executeQuery().next();
        }
    }

    /** The center, for any number of threads. */
    private static final class Center {
        private static final Metadata.Key<byte[]> DETAILS = Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
        private final List<MessageServiceGrpc.MessageServiceBlockingStub> stubs;
        private final AtomicInteger turn = new AtomicInteger();

        Center(String addresses, String key, String checks, Ledger ledger) {
            Metadata said = new Metadata();
            String[][] pairs = {
                {"tmc-app", "orders"}, {"authorization", "Bearer " + key}, {"tmc-check-address", checks},
                {"tmc-check-ledger", HexFormat.of().formatHex(ledger.id.toByteArray())},
            };
            for (String[] pair : pairs) {
                said.put(Metadata.Key.of(pair[0], Metadata.ASCII_STRING_MARSHALLER), pair[1]);
            }
            stubs = Stream.of(addresses.split(",")).map(address -> {
                Channel channel = Grpc.newChannelBuilder(address, InsecureChannelCredentials.create()).build();
                return MessageServiceGrpc.newBlockingStub(channel).withInterceptors(MetadataUtils.newAttachHeadersInterceptor(said));
            }).toList();
        }

        /** The servers in turn: after UNAVAILABLE, another one. */
        MessageServiceGrpc.MessageServiceBlockingStub stub() {
            return stubs.get(Math.floorMod(turn.getAndIncrement(), stubs.size())).withDeadlineAfter(10, TimeUnit.SECONDS);
        }

        /** Repeats the same call until its answer stays. A RetryInfo in the details says when to repeat it: decode it. */
        <T> T call(Supplier<T> call) {
            for (long wait = 50;; wait = Math.min(2 * wait, 2000)) {
                try {
                    return call.get();
                } catch (StatusRuntimeException e) {
                    switch (e.getStatus().getCode()) {
                        case UNAVAILABLE, DEADLINE_EXCEEDED, ABORTED, RESOURCE_EXHAUSTED -> pause(wait);
                        default -> throw e;
                    }
                }
            }
        }

        private static void pause(long ms) {
            try {
                Thread.sleep(ms);
            } catch (InterruptedException e) {
                throw new IllegalStateException(e);
            }
        }

        /** Returns whether a call was refused for this reason. It is text in a google.rpc.Status: with its proto, decode that. */
        static boolean hasReason(StatusRuntimeException e, String reason) {
            byte[] details = e.getTrailers() == null ? null : e.getTrailers().get(DETAILS);
            return details != null && new String(details, StandardCharsets.ISO_8859_1).contains(reason);
        }
    }

    /**
     * Answers checks to callers with the app's token, which it asks for again when it sees another one. The one before is taken for
     * another minute: servers learn of a rotation one by one.
     */
    private static final class Checks extends CheckServiceGrpc.CheckServiceImplBase implements ServerInterceptor {
        private static final Metadata.Key<String> TOKEN = Metadata.Key.of("tmc-check-token", Metadata.ASCII_STRING_MARSHALLER);
        private final Ledger ledger;
        private final Center center;
        private String token = "";
        private String previous = "";
        private long asked;
        private long rotated;

        private Checks(Ledger ledger, Center center) {
            this.ledger = ledger;
            this.center = center;
        }

        static Server serve(String address, Ledger ledger, Center center) throws Exception {
            Checks checks = new Checks(ledger, center);
            int port = Integer.parseInt(address.substring(address.lastIndexOf(':') + 1));
            return Grpc.newServerBuilderForPort(port, InsecureServerCredentials.create()).addService(checks).intercept(checks).build().start();
        }

        @Override
        public void checkMany(CheckManyRequest request, StreamObserver<CheckManyResponse> answers) {
            answers.onNext(CheckManyResponse.newBuilder().addAllResults(request.getItemsList().stream().map(ledger::answer).toList()).build());
            answers.onCompleted();
        }

        @Override
        public <Q, A> ServerCall.Listener<Q> interceptCall(ServerCall<Q, A> call, Metadata said, ServerCallHandler<Q, A> next) {
            if (!isRight(said.get(TOKEN))) {
                call.close(Status.PERMISSION_DENIED.withDescription("This is not the check token of the app."), new Metadata());
                return new ServerCall.Listener<>() {};
            }
            return next.startCall(call, said);
        }

        private synchronized boolean isRight(String shown) {
            if (!matches(shown) && System.currentTimeMillis() - asked > 5_000) {
                asked = System.currentTimeMillis();
                String now = center.stub().withDeadlineAfter(2, TimeUnit.SECONDS)
                        .describeChecks(DescribeChecksRequest.getDefaultInstance()).getCheckToken();
                if (!now.equals(token)) {
                    previous = token;
                    token = now;
                    rotated = System.currentTimeMillis();
                }
            }
            return matches(shown);
        }

        private boolean matches(String shown) {
            if (shown == null || shown.isEmpty()) {
                return false;
            }
            return same(token, shown) || same(previous, shown) && System.currentTimeMillis() - rotated < 60_000;
        }

        private static boolean same(String right, String shown) {
            return MessageDigest.isEqual(right.getBytes(StandardCharsets.UTF_8), shown.getBytes(StandardCharsets.UTF_8));
        }
    }
}
